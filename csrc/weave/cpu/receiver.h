// The cold model's side of a channel: keeps guest sequences and computes their attention with threads that come by.
//
// poll() may be called by any thread at any time and never waits: the compute threads of the cold model's graphs call
// it after every operator (weave_hooks.h), threads of its own while no graph is computed. A task is cut into items, a
// KV head of a sequence each, which whoever comes takes one by one; who finishes the last publishes the result.
#pragma once

#include "attention.h"
#include "region.h"
#include "ring.h"
#include "store.h"

#include <atomic>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

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
    uint64_t n_tasks     = 0; // that were done
    uint64_t n_refused   = 0; // of them, not with Status::ok
    uint64_t n_items     = 0; // of attention
    uint64_t n_epochs    = 0; // senders that came
    size_t   free_nbytes = 0;
    uint32_t n_sequences = 0;
};

class Receiver {
  public:
    // Throws ChannelError.
    Receiver(const std::string & path, const ReceiverOptions & options);
    ~Receiver();

    Receiver(const Receiver &)             = delete;
    Receiver & operator=(const Receiver &) = delete;

    void poll();

    // The threads of a graph of this process begin or end; those of the receiver rest meanwhile.
    void    graph(bool begins);
    bool    polls_in_graphs() const { return options_.polls != Polls::graphs; }
    int64_t part() const { return options_.polls == Polls::parts ? options_.part : 0; }

    // Ask the sender to take its sequences back. It does so before its next step.
    void drain(bool wanted);

    ReceiverStats stats() const;

  private:
    bool open_next();
    void open(uint32_t slot);
    void work();
    void finish(Status status, size_t nbytes);
    void beat();
    void forget();
    void idle();

    const ReceiverOptions options_;
    Region                region_;
    ReceiverRing<Region>  ring_;
    Store                 store_;
    AttendJob             job_;
    std::vector<char>     task_, result_; // payloads of the open task, in private memory

    std::atomic<bool>     taken_{ false }; // a task is open: ring_, store_, job_ and the payloads are its thread's
    std::atomic<uint64_t> claim_{ 0 };     // number of items << 32 | the next one
    std::atomic<uint32_t> left_{ 0 };      // items that are not done
    std::atomic<int>      n_graphs_{ 0 };
    std::atomic<bool>     ended_{ false };
    std::atomic<uint64_t> n_tasks_{ 0 }, n_refused_{ 0 }, n_items_{ 0 }, n_epochs_{ 0 };

    std::mutex state_mutex_;
    State      state_ = State::ready;

    std::vector<std::thread> threads_;
};

} // namespace oa::weave
