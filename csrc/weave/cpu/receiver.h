// The cold model's side of a channel: keeps guest sequences and computes their attention with threads that come by.
//
// poll() may be called by any thread at any time and never waits: the compute threads of the cold model's graphs call
// it after every operator (weave_hooks.h), threads of its own while no graph is computed. A task is cut into items, a
// KV head of a sequence each, which whoever comes takes one by one; who finishes the last publishes the result.
#pragma once

#include "attention.h"
#include "guest_receiver.h"
#include "region.h"
#include "ring.h"
#include "store.h"

#include <atomic>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace oa::weave {

class Receiver final : public GuestReceiver {
  public:
    // Throws ChannelError.
    Receiver(const std::string & path, const ReceiverOptions & options);
    ~Receiver() override;

    Receiver(const Receiver &)             = delete;
    Receiver & operator=(const Receiver &) = delete;

    void poll() override;

    // The threads of a graph of this process begin or end; those of the receiver rest meanwhile.
    void    graph(bool begins);
    bool    polls_in_graphs() const { return options_.polls != Polls::graphs; }
    int64_t part() const { return options_.polls == Polls::parts ? options_.part : 0; }
    // Threads of graphs have polled so many times more.
    void looked(uint32_t n) { n_looks_.fetch_add(n, std::memory_order_relaxed); }

    void drain(bool wanted) override;

    ReceiverStats stats() const override;

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
    std::atomic<uint64_t> n_tasks_{ 0 }, n_refused_{ 0 }, n_items_{ 0 }, n_epochs_{ 0 }, n_looks_{ 0 }, n_drains_{ 0 };

    std::mutex state_mutex_;
    State      state_ = State::ready;

    std::vector<std::thread> threads_;
};

} // namespace oa::weave
