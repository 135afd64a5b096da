// The receiver's launches: a look (look.h), and the work that it may have opened (receive.h).
#pragma once

#include "receiver_state.h"

#include <cuda_runtime.h>

namespace oa::weave::cuda {

// Blocks of a work's launch on the current device: as many as fit at once.
cudaError_t poll_blocks(int & n_blocks);

// Whether captured graphs can launch the work only after a look that has opened a task. `why_not`: static.
bool conditional_works(const char *& why_not);

// Look for a task, and do it. May be captured: all that changes is in `state`, which is in device memory. The work is a
// launch whose blocks leave at once if the look has opened nothing; where it is captured and `conditional`, none.
cudaError_t launch_poll(ReceiverState * state, int n_blocks, bool conditional, cudaStream_t stream);

// Before launch_poll() where nothing else is to do: ends when there may be a task, when *stop (in host memory) is not
// 0, or after so many nanoseconds.
cudaError_t launch_watch(ReceiverState * state, uint64_t patience, const uint32_t * stop, cudaStream_t stream);

// For benchmarks: a thread that keeps its place for so many nanoseconds, as a kernel of the cold model.
cudaError_t launch_busy(uint64_t ns, cudaStream_t stream);

} // namespace oa::weave::cuda
