// A kernel of a captured graph that is launched only if the one before it says so (CUDA 12.4): the body of an IF node.
#pragma once

#include <cuda_runtime.h>

#if CUDART_VERSION >= 12040

namespace oa::weave::cuda {

using Condition = cudaGraphConditionalHandle;

// While `stream` is captured: made before the kernel that decides (by cudaGraphSetConditional on `condition`; not at
// all is no), then(): after it. What is captured next follows the body.
class Conditional {
  public:
    // condition: void if there is an error.
    cudaError_t open(cudaStream_t stream);
    Condition   condition() const { return condition_; }
    cudaError_t then(const cudaKernelNodeParams & body);

  private:
    cudaStream_t stream_    = nullptr;
    cudaGraph_t  graph_     = nullptr;
    Condition    condition_ = 0;
};

// Tries it on the current device as ggml-cuda would come by it: captured, instantiated, updated, captured anew, updated
// again, with a programmatic launch behind it where there are any. Success: the body ran when it was to, and only then.
cudaError_t try_conditional();

} // namespace oa::weave::cuda

#endif
