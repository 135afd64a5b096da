// The receiver of this process on a GPU, which the graphs of that GPU serve.
#include "../region.h"
#include "cuda_check.h"
#include "graph_run.h"
#include "receiver_cuda.h"
#include "weave_hooks_cuda.h"

#include <algorithm>
#include <atomic>
#include <cctype>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <string>

namespace {

using oa::weave::ChannelError;
using oa::weave::cuda::CudaReceiver;
using oa::weave::cuda::CudaReceiverOptions;
using oa::weave::cuda::Working;

std::atomic<CudaReceiver *> receiver{ nullptr };
std::atomic<int>            served_by{ -1 }; // ggml's number of the device whose graphs serve it

CudaReceiver * of(int device) {
    CudaReceiver * of_process = receiver.load(std::memory_order_relaxed);
    return of_process && served_by.load(std::memory_order_relaxed) == device ? of_process : nullptr;
}

// The model goes on without guests; where the device has failed ggml finds out by itself.
template <class Action> void report(Action && action) {
    try {
        action();
    } catch (const std::exception & e) {
        fprintf(stderr, "oallama: no guests on this GPU: %s\n", e.what());
    }
}

// The number after a colon; 0: there is none.
uint64_t take_number(const std::string & from, size_t & at) {
    char * end = nullptr;
    if (at >= from.size() || from[at] != ':' || !isdigit(from[at + 1])) {
        return 0;
    }
    const uint64_t number = strtoull(from.c_str() + at + 1, &end, 10);
    at                    = size_t(end - from.c_str());
    return number;
}

Working working() {
    const char *      given = getenv("OALLAMA_WEAVE_CUDA_WORK");
    const std::string how   = given ? given : "";
    if (how != "" && how != "conditional" && how != "plain") {
        throw ChannelError("OALLAMA_WEAVE_CUDA_WORK is conditional or plain, got " + how);
    }
    return how == "" ? Working::best : how == "plain" ? Working::plain : Working::conditional;
}

void make_receiver(int device) {
    const char * given = getenv("OALLAMA_WEAVE_CUDA_RECEIVER");
    if (!given) {
        return;
    }
    const std::string   all   = given;
    const size_t        colon = std::min(all.find(':'), all.size());
    size_t              at    = colon;
    CudaReceiverOptions options;
    options.device       = oa::weave::cuda::card_of(device);
    options.working      = working();
    options.quota_nbytes = take_number(all, at);
    bool sound           = options.quota_nbytes > 0;
    if (at < all.size()) {
        for (uint32_t * number : { &options.distance.decode, &options.distance.prompt, &options.distance.few }) {
            *number = uint32_t(take_number(all, at));
            sound   = sound && *number > 0;
        }
    }
    if (!sound || at < all.size()) {
        throw ChannelError("OALLAMA_WEAVE_CUDA_RECEIVER is path:bytes[:decode:prompt:few], got " + all);
    }
    served_by = device;
    receiver  = new CudaReceiver(all.substr(0, colon), options);
    std::atexit([] { delete receiver.exchange(nullptr); }); // CUDA, which was there before, is still there then
}

// Rows of a product with a weight, or of attention; 0: another operator.
uint64_t rows_of(const ggml_tensor * node) {
    switch (node->op) {
        case GGML_OP_MUL_MAT: return uint64_t(node->ne[1]);
        case GGML_OP_MUL_MAT_ID:
        case GGML_OP_FLASH_ATTN_EXT: return uint64_t(node->ne[2]);
        default: return 0;
    }
}

void end() {
    if (CudaReceiver * there = receiver) {
        report([&] { there->end(); });
    }
}

} // namespace

void oa_weave_cuda_begin(int device, cudaStream_t stream) {
    static std::once_flag once;
    std::call_once(once, [&] { report([&] { make_receiver(device); }); });
    if (auto * there = of(device)) {
        report([&] { there->begin(stream); });
    }
}

void oa_weave_cuda_end(int device) {
    if (of(device) && !oa_graph_run_then(end)) {
        end();
    }
}

void oa_weave_cuda_poll(int device, cudaStream_t stream, ggml_tensor * const * nodes, int n_nodes) {
    auto * there = of(device);
    if (!there) {
        return;
    }
    uint32_t n_products = 0;
    uint64_t most_rows  = 0;
    for (int i = 0; i < n_nodes; ++i) {
        const uint64_t n_rows = rows_of(nodes[i]);
        n_products += n_rows > 0;
        most_rows = std::max(most_rows, n_rows);
    }
    if (n_products > 0 || n_nodes == 0) {
        report([&] { there->worked(n_products, most_rows, stream); });
    }
}
