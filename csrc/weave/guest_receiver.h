// What a process asks of the receiver of its channel on the CPU (cpu/receiver.h).
#pragma once

#include <cstddef>
#include <cstdint>

namespace oa::weave {

// When the threads of a graph look for tasks: at its end, so that guests wait for all of it; after every operator; also
// inside of matrix multiplications, every so many multiply-adds.
enum class Polls { graphs, operators, parts };

struct ReceiverOptions {
    size_t   quota_nbytes  = size_t(1) << 30;
    size_t   task_nbytes   = size_t(8) << 20; // all slots together fit into the 64 MB that containers have
    size_t   result_nbytes = size_t(4) << 20;
    uint32_t n_slots       = 4;
    uint32_t n_idle        = 1; // threads that poll while no graph is computed
    Polls    polls         = Polls::parts;
    int64_t  part          = 1 << 20; // multiply-adds between two polls of a thread
};

struct ReceiverStats {
    uint64_t n_tasks      = 0; // that were done
    uint64_t n_refused    = 0; // of them, not with Status::ok
    uint64_t n_items      = 0; // of attention
    uint64_t n_epochs     = 0; // senders that came
    uint64_t n_looks      = 0; // of graphs' threads, for tasks; in 64s
    uint64_t n_drains     = 0; // how often the sender was asked to take its sequences back
    size_t   quota_nbytes = 0;
    size_t   free_nbytes  = 0;
    uint32_t n_sequences  = 0;
};

class GuestReceiver {
  public:
    virtual ~GuestReceiver() = default;

    // Serves a task if there is one; never waits.
    virtual void poll() = 0;
    // Ask the sender to take its sequences back. It does so before its next step.
    virtual void drain(bool wanted) = 0;

    virtual ReceiverStats stats() const = 0;
};

} // namespace oa::weave
