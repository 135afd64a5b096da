// The cold model's side of a channel on a GPU: keeps guest sequences, and computes their attention between the cold
// model's kernels.
//
// The host takes no part in attention. A thread of it answers what the sender's host asks between two iterations
// (control.h), another one lets the device look for tasks while no graph is computed.
#pragma once

#include "block_store.h"
#include "control.h"

#include <atomic>
#include <condition_variable>
#include <cuda_runtime.h>
#include <memory>
#include <mutex>
#include <thread>

namespace oa::weave::cuda {

struct CudaReceiverOptions {
    int      device        = 0;
    size_t   quota_nbytes  = size_t(1) << 30; // of the device's memory, taken at once
    size_t   task_nbytes   = size_t(16) << 20;
    size_t   result_nbytes = size_t(8) << 20;
    uint32_t n_slots       = 4;
    uint32_t max_tokens    = 1 << 17;    // of a sequence
    uint64_t watch_ns      = 200 * 1000; // of a look while no graph is computed
    uint32_t every         = 1;          // a poll after so many of a graph's nodes
};

struct CudaReceiverStats {
    uint32_t n_polls, n_tasks,
        n_refused; // of this sender's launches so far; as of the last time that the device rested
    uint32_t n_senders, n_sequences;
    size_t   free_nbytes;
};

class CudaReceiver {
  public:
    // Throws ChannelError.
    CudaReceiver(const std::string & path, const CudaReceiverOptions & options);
    ~CudaReceiver();

    CudaReceiver(const CudaReceiver &)             = delete;
    CudaReceiver & operator=(const CudaReceiver &) = delete;

    // These throw ChannelError once, when the device fails. Around the launches of a graph of this device, not
    // captured. From begin() to end() no other thread's graph is launched; on the device they follow each other, since
    // polls must not overlap.
    void begin(cudaStream_t stream);
    void end(cudaStream_t stream);
    // In between, also while capturing: after a node, on the graph's main stream outside of forks.
    void poll(cudaStream_t stream);

    int device() const { return options_.device; }
    // Ask the sender to take its sequences back.
    void drain(bool wanted) { draining_ = wanted; }

    // Looks on the device; not while capturing. Throws ChannelError.
    CudaReceiverStats stats() const;

  private:
    void   set_up();
    void   let_go();
    void   serve();
    void   serve(Line & line);
    Answer answer(const Question & question, int file, std::unique_ptr<SharedMemory> & inbox,
                  std::unique_ptr<SharedMemory> & outbox);
    void   set(Setup setup);
    void   upload(void * to, const void * from, size_t nbytes);
    void   idle();
    void   check_device(cudaError_t code, const char * what);

    const CudaReceiverOptions   options_;
    Listener                    listener_;
    size_t                      task_nbytes_, result_nbytes_; // of a slot, its header included
    int                         n_blocks_    = 0;
    ReceiverState *             state_       = nullptr; // of the device, as all to `merges_`
    char *                      pool_        = nullptr;
    uint32_t *                  pages_       = nullptr;
    float *                     partials_    = nullptr;
    uint32_t *                  merges_      = nullptr;
    uint32_t *                  words_       = nullptr; // of the host, for the device: adopted, stop
    cudaStream_t                idle_stream_ = nullptr, upload_stream_ = nullptr;
    cudaEvent_t                 ended_event_ = nullptr, rest_event_ = nullptr; // of the last graph; of idle_stream_
    std::unique_ptr<BlockStore> store_;
    uint32_t                    n_setups_ = 0;

    std::mutex              graphs_; // from begin() to end()
    mutable std::mutex      mutex_;  // of what follows
    std::condition_variable changed_;
    bool                    in_graph_ = false, resting_ = false, has_ended_event_ = false, served_ = false;
    uint32_t                nodes_ = 0;
    std::atomic<bool>       ended_{ false }, idle_ended_{ false }, failed_{ false }, draining_{ false };
    std::atomic<uint32_t>   n_senders_{ 0 };
    CudaReceiverStats       stats_ = {};
    std::thread             serving_, idling_;
};

} // namespace oa::weave::cuda
