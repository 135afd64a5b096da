// The receiver of this process, which the compute threads of all its graphs serve (weave_hooks.h).
#pragma once

#include "receiver.h"

#include <memory>

namespace oa::weave {

// Replaces the one before; null: none. No graph may be computed meanwhile.
void set_receiver(std::shared_ptr<Receiver> receiver);

// From OALLAMA_WEAVE_RECEIVER (path:quota in bytes[:graphs, operators or parts]), once; does nothing without it. Throws
// ChannelError.
void set_receiver_from_environment();

} // namespace oa::weave
