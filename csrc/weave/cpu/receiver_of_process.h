// The receiver of this process, which the compute threads of all its graphs serve (weave_hooks.h).
#pragma once

#include "cpu_functions.h" // callers outside of ggml-cpu need OA_OF_CPU
#include "guest_receiver.h"

#include <memory>
#include <string>

namespace oa::weave {

// A receiver on the CPU. Throws ChannelError.
std::shared_ptr<GuestReceiver> make_receiver(const std::string & path, const ReceiverOptions & options);

// Replaces the one before, made by make_receiver(); null: none. No graph may be computed meanwhile.
void set_receiver(std::shared_ptr<GuestReceiver> receiver);

// Of the receiver of this process; false: it has none.
bool receiver_stats(ReceiverStats & stats);

// From OALLAMA_WEAVE_RECEIVER (path:quota in bytes[:graphs, operators or parts]), once; does nothing without it. Throws
// ChannelError.
void set_receiver_from_environment();

} // namespace oa::weave
