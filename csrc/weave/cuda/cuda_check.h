// Errors of CUDA's runtime, and the current device, while calls are ours.
#pragma once

#include "../region.h"

#include <cuda_runtime.h>
#include <string>

namespace oa::weave::cuda {

inline void check(cudaError_t code, const std::string & what) {
    if (code != cudaSuccess) {
        cudaGetLastError(); // not one that others should find
        throw ChannelError("CUDA cannot " + what + ": " + cudaGetErrorString(code));
    }
}

// The number that CUDA knows a device of ggml-cuda's by: with GGML_CUDA_DEVICES several share a card, dealt in turn.
inline int card_of(int device) {
    int n_cards = 0;
    check(cudaGetDeviceCount(&n_cards), "count devices");
    return n_cards > 0 ? device % n_cards : device;
}

class OnDevice {
  public:
    explicit OnDevice(int device) {
        check(cudaGetDevice(&before_), "tell the current device");
        check(cudaSetDevice(device), "use device " + std::to_string(device));
    }
    ~OnDevice() { cudaSetDevice(before_); }

    OnDevice(const OnDevice &)             = delete;
    OnDevice & operator=(const OnDevice &) = delete;

  private:
    int before_ = 0;
};

} // namespace oa::weave::cuda
