// Guests' operators and looks for tasks as ggml-cuda's graphs have them, for tests/weave/test_weave_cuda.py; no part of
// the engine. As api_for_tests_cuda.cpp.
#include "for_tests_cuda.h"
#include "graph_run.h"
#include "guest_op.h"
#include "receive_cuda.h"
#include "weave_hooks_cuda.h"

#include <cstdlib>
#include <memory>
#include <vector>

using namespace oa::weave;
using namespace oa::weave::cuda;

namespace {

// Of ggml: rows of n1 heads of n0 values.
ggml_tensor tensor_of(const float * data, size_t n0, size_t n1, size_t n_rows) {
    ggml_tensor  made  = {};
    const size_t ne[4] = { n0, n1, n_rows, 1 };
    made.type          = GGML_TYPE_F32;
    made.data          = const_cast<float *>(data);
    for (int i = 0; i < 4; ++i) {
        made.ne[i] = int64_t(ne[i]);
        made.nb[i] = i == 0 ? sizeof(float) : made.nb[i - 1] * ne[i - 1];
    }
    return made;
}

// The operators of a layer as guest_graph.cpp makes them.
struct GraphLayer {
    GraphLayer(const CudaAttention & wanted, uint32_t sender, const float * own, size_t n_own, float * out) :
        task(wanted.task), q(tensor_of(wanted.q, task.d_k, task.n_head, task.n_rows)),
        k(tensor_of(wanted.k, task.d_k, task.n_head_kv, task.n_rows)),
        v(tensor_of(wanted.v, task.d_v, task.n_head_kv, task.n_rows)),
        sinks(tensor_of(wanted.sinks, task.n_head, 1, 1)), local(tensor_of(own, wanted.out_stride(), n_own, 1)),
        send(tensor_of(wanted.out, wanted.out_stride(), task.n_rows, 1)),
        receive(tensor_of(out, wanted.out_stride(), n_own + task.n_rows, 1)) {
        send.op = receive.op = GGML_OP_CUSTOM;
        send.src[0]          = &q;
        send.src[1]          = &k;
        send.src[2]          = &v;
        send.src[3]          = wanted.sinks ? &sinks : nullptr;
        receive.src[0]       = &send;
        receive.src[1]       = n_own > 0 ? &local : nullptr;
        set_guest_op(&send, { GuestOp::Kind::send, sender, &task });
        set_guest_op(&receive, { GuestOp::Kind::receive, sender, &task });
    }

    GraphLayer(const GraphLayer &)             = delete;
    GraphLayer & operator=(const GraphLayer &) = delete;

    bool supported(int device) const {
        return oa_weave_cuda_supports(device, &send) && oa_weave_cuda_supports(device, &receive);
    }

    AttendTask    task;
    ggml_tensor   q, k, v, sinks, local, send, receive;
    ggml_tensor * nodes[2] = { &send, &receive };
};

} // namespace

extern "C" {

// As ggml-cuda with patch 0012: `n_graphs` graphs of `n_splits` splits, each of `n_nodes` products of `n_rows` rows
// that take `node_ns` each; captured from the third graph on.
int wc_ggml_graphs(uint32_t n_graphs, uint32_t n_splits, uint32_t n_nodes, uint64_t n_rows, uint64_t node_ns) {
    return guarded(
        [&] {
            Stream stream;
            int    device = 0;
            check(cudaGetDevice(&device), "tell the current device");
            if (const char * n_virtual = getenv("GGML_CUDA_DEVICES")) { // the last of them
                device = atoi(n_virtual) - 1;
            }
            ggml_tensor product = {}, add = {};
            product.op         = GGML_OP_MUL_MAT;
            product.ne[1]      = int64_t(n_rows);
            add.op             = GGML_OP_ADD;
            const auto enqueue = [&] {
                ggml_tensor * nodes[] = { &product, &add };
                for (uint32_t node = 0; node < n_nodes; ++node) {
                    check(launch_busy(node_ns, stream), "keep the device busy");
                    oa_weave_cuda_poll(device, stream, nodes, 2); // fused
                    oa_weave_cuda_poll(device, stream, nodes + 1, 1);
                }
                oa_weave_cuda_poll(device, stream, nullptr, 0);
            };
            std::vector<std::unique_ptr<Launches<decltype(enqueue)>>> captured(n_splits);
            for (uint32_t i = 0; i < n_graphs; ++i) {
                const oa_graph_run run;
                for (auto & split : captured) {
                    oa_weave_cuda_begin(device, stream);
                    if (i == 2) {
                        split = std::make_unique<Launches<decltype(enqueue)>>(true, stream, enqueue);
                    }
                    split ? split->launch() : enqueue();
                    oa_weave_cuda_end(device);
                }
            }
            stream.wait();
            return 0;
        },
        -1);
}

// A sender as libllama gets it from ggml-cuda's registry.
CudaSender * wc_graph_sender_new(const char * path, const OpenTask * shape, double deadline_s, uint32_t base) {
    return guarded(
        [&] {
            auto made = oa_weave_new_cuda_sender(0, path, *shape, options_of(deadline_s, base));
            return static_cast<CudaSender *>(made.release());
        },
        static_cast<CudaSender *>(nullptr));
}

// As wc_sender_attend, by the operators of a graph: `n_own` rows of results of the model's own, then the guests'.
int wc_graph_attend(CudaSender * sender, const AttendTask * task, const SequenceRows * rows, const float * sinks,
                    const float * q, const float * k, const float * v, float * out, const float * own, uint32_t n_own,
                    int captured) {
    return guarded(
        [&] {
            const size_t n = task->n_rows, width = size_t(task->n_head) * task->d_v;
            OnGpu<float> of_q(q, n * task->n_head * task->d_k), of_k(k, n * task->n_head_kv * task->d_k);
            OnGpu<float> of_v(v, n * task->n_head_kv * task->d_v), of_sent(nullptr, n * width);
            OnGpu<float> of_sinks(sinks, sinks ? task->n_head : 0), of_own(own, n_own * width);
            OnGpu<float> of_out(nullptr, (n_own + n) * width);
            GraphLayer   layer(attention_of(*task, of_q, of_k, of_v, sinks ? of_sinks.get() : nullptr, of_sent),
                               sender->number(), of_own.get(), n_own, of_out.get());
            if (!layer.supported(0) || layer.supported(1)) {
                throw ChannelError("the operators belong to the sender's device");
            }
            Stream   stream;
            Launches work(captured != 0, stream, [&] {
                for (ggml_tensor * node : layer.nodes) {
                    if (!oa_weave_cuda_forward(stream, node)) {
                        throw ChannelError("an operator is not the sender's");
                    }
                }
            });
            for (int i = 0; i <= captured; ++i) {
                sender->set_rows({ rows, rows + task->n_sequences });
                oa_weave_cuda_plan(stream, layer.nodes, 2);
                work.launch();
                stream.wait();
            }
            of_out.copy_to(out);
            if (!sender->lives()) {
                throw ChannelError(sender->error());
            }
            return 0;
        },
        -1);
}

uint32_t wc_graph_number(CudaSender * sender) {
    return sender->number();
}

// Whether operators are the sender's when one thing about them is another.
int wc_graph_supported(CudaSender * sender, const char * what) {
    const std::string changed = what;
    CudaAttention     wanted  = {};
    wanted.task.n_rows        = 2;
    wanted.task.n_head        = 4;
    wanted.task.n_head_kv     = 2;
    wanted.task.d_k           = changed == "width" ? 63 : 64;
    wanted.task.d_v           = 64;
    const uint32_t number     = sender->number() + (changed == "number");
    float          own        = 0.0f;
    GraphLayer     layer(wanted, number, &own, 1, nullptr);
    if (changed == "mark") {
        set_guest_op(&layer.send, {});
    } else if (changed == "operator") {
        layer.send.op = layer.receive.op = GGML_OP_MAP_CUSTOM1;
    } else if (changed == "offset") {
        layer.k.view_offs = 8;
    } else if (changed == "heads") {
        layer.q.nb[1] *= 2;
    } else if (changed == "type") {
        layer.v.type = GGML_TYPE_F16;
    } else if (changed == "source") { // a copy that the scheduler has made
        layer.receive.src[0] = &layer.local;
    }
    return layer.supported(changed == "device" ? 1 : 0);
}
}
