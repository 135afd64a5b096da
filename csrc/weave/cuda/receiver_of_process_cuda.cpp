// The receiver of this process on a GPU, which the graphs of that GPU serve.
#include "../region.h"
#include "receiver_cuda.h"
#include "weave_hooks_cuda.h"

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <string>

namespace {

using oa::weave::ChannelError;
using oa::weave::cuda::CudaReceiver;
using oa::weave::cuda::CudaReceiverOptions;

std::atomic<CudaReceiver *> receiver{ nullptr };

CudaReceiver * of(int device) {
    CudaReceiver * of_process = receiver.load(std::memory_order_relaxed);
    return of_process && of_process->device() == device ? of_process : nullptr;
}

// The model goes on without guests; where the device has failed ggml finds out by itself.
template <class Action> void report(Action && action) {
    try {
        action();
    } catch (const std::exception & e) {
        fprintf(stderr, "oallama: no guests on this GPU: %s\n", e.what());
    }
}

void make_receiver(int device) {
    const char * given = getenv("OALLAMA_WEAVE_CUDA_RECEIVER");
    if (!given) {
        return;
    }
    const std::string   all   = given;
    const size_t        colon = all.find(':');
    char *              end   = nullptr;
    CudaReceiverOptions options;
    options.device = device;
    if (colon != std::string::npos) {
        options.quota_nbytes = strtoull(all.c_str() + colon + 1, &end, 10);
        if (*end == ':') {
            options.every = uint32_t(strtoul(end + 1, &end, 10));
        }
    }
    if (!end || *end != '\0' || options.quota_nbytes == 0 || options.every == 0) {
        throw ChannelError("OALLAMA_WEAVE_CUDA_RECEIVER is path:bytes[:nodes between polls], got " + all);
    }
    receiver = new CudaReceiver(all.substr(0, colon), options);
    std::atexit([] { delete receiver.exchange(nullptr); }); // CUDA, which was there before, is still there then
}

} // namespace

void oa_weave_cuda_begin(int device, cudaStream_t stream) {
    static std::once_flag once;
    std::call_once(once, [&] { report([&] { make_receiver(device); }); });
    if (auto * there = of(device)) {
        report([&] { there->begin(stream); });
    }
}

void oa_weave_cuda_end(int device, cudaStream_t stream) {
    if (auto * there = of(device)) {
        report([&] { there->end(stream); });
    }
}

void oa_weave_cuda_poll(int device, cudaStream_t stream) {
    if (auto * there = of(device)) {
        report([&] { there->poll(stream); });
    }
}
