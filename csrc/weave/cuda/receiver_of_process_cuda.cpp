#include "receiver_of_process_cuda.h"

#include "../region.h"
#include "weave_hooks_cuda.h"

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <string>

namespace {

using oa::weave::ChannelError;
using oa::weave::cuda::CudaReceiver;

std::shared_ptr<CudaReceiver> owner;
std::atomic<CudaReceiver *>   receiver{ nullptr };

CudaReceiver * of(int device) {
    CudaReceiver * of_process = receiver.load(std::memory_order_relaxed);
    return of_process && of_process->device() == device ? of_process : nullptr;
}

// The device has failed: ggml finds out by itself.
template <class Action> void report(Action && action) {
    try {
        action();
    } catch (const ChannelError & e) {
        fprintf(stderr, "oallama: %s\n", e.what());
    }
}

} // namespace

void oa_weave_cuda_begin(int device, cudaStream_t stream) {
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

namespace oa::weave::cuda {

void set_cuda_receiver(std::shared_ptr<CudaReceiver> wanted) {
    receiver.store(nullptr);
    owner = std::move(wanted);
    receiver.store(owner.get());
}

void set_cuda_receiver_from_environment(int device) {
    static bool  done  = false;
    const char * given = getenv("OALLAMA_WEAVE_CUDA_RECEIVER");
    if (done || !given) {
        return;
    }
    done                      = true;
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
    set_cuda_receiver(std::make_shared<CudaReceiver>(all.substr(0, colon), options));
}

} // namespace oa::weave::cuda
