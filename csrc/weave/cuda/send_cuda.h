// The sender's launches (send.h). All may be captured: what changes is in `state`, which is in device memory.
#pragma once

#include "sender_state.h"

#include <cuda_runtime.h>

namespace oa::weave::cuda {

// A new epoch; until the receiver serves it; a task there and back. Failures are in the host's report.
cudaError_t launch_attach(SenderState * state, cudaStream_t stream);

// Rows of a layer leave.
cudaError_t launch_send(SenderState * state, const SendCall & call, cudaStream_t stream);

// A bounded wait for the oldest task that was not fetched, and its rows to their place: zeros if the sender has failed.
cudaError_t launch_fetch(SenderState * state, const FetchCall & call, cudaStream_t stream);

} // namespace oa::weave::cuda
