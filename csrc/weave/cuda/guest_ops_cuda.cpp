// The hot models' senders of this process, and the two operators of guest_graph.cpp on their device.
#include "cuda_check.h"
#include "guest_op.h"
#include "sender_cuda.h"
#include "weave_hooks_cuda.h"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <vector>

using namespace oa::weave;
using namespace oa::weave::cuda;

namespace {

class GraphSender;

std::mutex                 mutex;
std::vector<GraphSender *> senders;
std::atomic<uint32_t>      n_made{ 0 };

// A sender that graphs know by its number. What it is asked by a graph is asked by the thread that it belongs to.
class GraphSender final : public CudaSender {
  public:
    GraphSender(int device, const std::string & path, const OpenTask & shape, const SenderOptions & options) :
        CudaSender(path, shape, card_of(device), options), number_(++n_made), of_ggml_(device) {
        const std::lock_guard lock(mutex);
        senders.push_back(this);
    }
    ~GraphSender() override {
        const std::lock_guard lock(mutex);
        senders.erase(std::find(senders.begin(), senders.end(), this));
    }

    uint32_t number() const override { return number_; }
    int      of_ggml() const { return of_ggml_; }
    void     set_rows(const std::vector<SequenceRows> & rows) override { rows_ = rows; }

    void plan_rows(cudaStream_t stream) {
        if (!rows_.empty()) {
            plan(rows_.data(), uint32_t(rows_.size()), stream);
            rows_.clear();
        }
    }

  private:
    const uint32_t            number_;
    const int                 of_ggml_; // its number of the device
    std::vector<SequenceRows> rows_;    // not planned yet
};

// Null: the operator is not one of a sender here.
GraphSender * sender_of(const GuestOp & op) {
    if (op.kind == GuestOp::Kind::none) {
        return nullptr;
    }
    const std::lock_guard lock(mutex);
    const auto found = std::find_if(senders.begin(), senders.end(), [&](auto * s) { return s->number() == op.sender; });
    return found == senders.end() ? nullptr : *found;
}

// The graph goes on; what it computes is void, as with any failure.
template <class Action> void or_give_up(GraphSender & sender, Action && action) {
    try {
        action();
    } catch (const ChannelError & e) {
        sender.give_up(e.what());
    }
}

const float * floats(const ggml_tensor * x) {
    return static_cast<const float *>(x->data);
}

bool is_plain(const ggml_tensor * x) {
    return x && x->type == GGML_TYPE_F32 && x->nb[0] == sizeof(float) && x->nb[1] == size_t(x->ne[0]) * sizeof(float) &&
           x->nb[2] % 16 == 0 && x->view_offs % 16 == 0;
}

CudaAttention attention_of(const ggml_tensor * sent) {
    const ggml_tensor *q = sent->src[0], *k = sent->src[1], *v = sent->src[2], *sinks = sent->src[3];
    CudaAttention      made = {};
    made.task               = *guest_op(sent).task;
    made.task.n_rows        = uint32_t(q->ne[2]);
    made.task.n_chunks      = 1;
    made.sinks              = sinks ? floats(sinks) : nullptr;
    made.q                  = floats(q);
    made.k                  = floats(k);
    made.v                  = floats(v);
    made.q_stride           = q->nb[2] / sizeof(float);
    made.k_stride           = k->nb[2] / sizeof(float);
    made.v_stride           = v->nb[2] / sizeof(float);
    made.out                = static_cast<float *>(sent->data);
    return made;
}

// dst: the local rows (src[1], if any), then the guests' (src[0]).
void receive(GraphSender & sender, ggml_tensor * dst, cudaStream_t stream) {
    sender.receive(attention_of(dst->src[0]), stream);
    char * to = static_cast<char *>(dst->data);
    for (const ggml_tensor * part : { dst->src[1], dst->src[0] }) {
        if (part) {
            const size_t nbytes = part->nb[3] * size_t(part->ne[3]);
            check(cudaMemcpyAsync(to, part->data, nbytes, cudaMemcpyDeviceToDevice, stream), "put rows together");
            to += nbytes;
        }
    }
}

} // namespace

std::unique_ptr<GuestSender> oa_weave_new_cuda_sender(int device, const std::string & path, const OpenTask & shape,
                                                      const SenderOptions & options) {
    return std::make_unique<GraphSender>(device, path, shape, options);
}

bool oa_weave_cuda_supports(int device, const ggml_tensor * node) {
    const GuestOp       op     = guest_op(node);
    const GraphSender * sender = sender_of(op);
    if (!sender || sender->of_ggml() != device || node->type != GGML_TYPE_F32) {
        return false;
    }
    const auto * const * src = node->src;
    if (op.kind == GuestOp::Kind::receive) {
        const GuestOp sent = guest_op(src[0]);
        return sent.kind == GuestOp::Kind::send && sent.sender == op.sender &&
               (!src[1] || src[1]->type == GGML_TYPE_F32);
    }
    return is_plain(src[0]) && is_plain(src[1]) && is_plain(src[2]) && (!src[3] || src[3]->type == GGML_TYPE_F32);
}

void oa_weave_cuda_plan(cudaStream_t stream, ggml_tensor * const * nodes, int n_nodes) {
    if (n_made.load(std::memory_order_relaxed) == 0) {
        return;
    }
    for (int i = 0; i < n_nodes; ++i) {
        if (GraphSender * sender = sender_of(guest_op(nodes[i]))) {
            return or_give_up(*sender, [&] { sender->plan_rows(stream); });
        }
    }
}

bool oa_weave_cuda_forward(cudaStream_t stream, ggml_tensor * node) {
    const GuestOp op     = guest_op(node);
    GraphSender * sender = sender_of(op);
    if (!sender) {
        return false;
    }
    or_give_up(*sender, [&] {
        if (op.kind == GuestOp::Kind::send) {
            sender->send(attention_of(node), stream);
        } else {
            receive(*sender, node, stream);
        }
    });
    return true;
}
