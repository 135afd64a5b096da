// The receiver of this process on a GPU, which the graphs of that GPU serve (weave_hooks_cuda.h).
#pragma once

#include "receiver_cuda.h"

#include <memory>

namespace oa::weave::cuda {

// Replaces the one before; null: none. No graph may be computed meanwhile, and none that was captured before is
// launched again: its polls are of the receiver that was then.
void set_cuda_receiver(std::shared_ptr<CudaReceiver> receiver);

// From OALLAMA_WEAVE_CUDA_RECEIVER (path:quota in bytes[:nodes between polls]), once; does nothing without it. Throws
// ChannelError.
void set_cuda_receiver_from_environment(int device);

} // namespace oa::weave::cuda
