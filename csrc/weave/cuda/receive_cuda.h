// The receiver's launch (receive.h).
#pragma once

#include "receiver_state.h"

#include <cuda_runtime.h>

namespace oa::weave::cuda {

// Blocks of a launch on the current device: as many as fit at once.
cudaError_t poll_blocks(int & n_blocks);

// Look for a task, and do it. May be captured: all that changes is in `state`, which is in device memory.
cudaError_t launch_poll(ReceiverState * state, int n_blocks, cudaStream_t stream);

// Before launch_poll() where nothing else is to do: ends when there may be a task, when *stop (in host memory) is not
// 0, or after so many nanoseconds.
cudaError_t launch_watch(ReceiverState * state, uint64_t patience, const uint32_t * stop, cudaStream_t stream);

// For benchmarks: a thread that keeps its place for so many nanoseconds, as a kernel of the cold model.
cudaError_t launch_busy(uint64_t ns, cudaStream_t stream);

} // namespace oa::weave::cuda
