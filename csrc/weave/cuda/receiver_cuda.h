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

// How much of a graph is between two looks: so many products with weights or attentions, of few rows each (decoding,
// `few` at most) or of many (a prompt). Not measured on any GPU; `oallama weave plan` chooses by the profile.
struct Distance {
    uint32_t decode = 8, prompt = 2, few = 16;
};

// How a look that has opened a task has it worked on.
enum class Working { best, conditional, plain };

struct CudaReceiverOptions {
    int      device        = 0;
    size_t   quota_nbytes  = size_t(1) << 30; // of the device's memory, taken at once
    size_t   task_nbytes   = size_t(16) << 20;
    size_t   result_nbytes = size_t(8) << 20;
    uint32_t n_slots       = 4;
    uint32_t max_tokens    = 1 << 17;    // of a sequence
    uint64_t watch_ns      = 200 * 1000; // of a look while no graph is computed
    Distance distance;
    Working  working = Working::best; // conditional where it works
};

struct CudaReceiverStats {
    uint32_t n_looks, n_tasks,
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

    // These throw ChannelError once, when the device fails. Before the launches of a graph of this device, and at the
    // end of a run of graphs by one thread; not captured. From the first begin() to end() no other thread's graph is
    // launched; on the device they follow each other, since launches of a receiver must not overlap.
    void begin(cudaStream_t stream);
    void end();
    // In between, also while capturing: after so many products of so many rows, on the graph's main stream outside of
    // forks; 0: after the last node.
    void worked(uint32_t n_products, uint64_t n_rows, cudaStream_t stream);

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
    void   look(cudaStream_t stream);
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

    std::mutex                   graphs_;  // from the first begin() of a run to end(), with the three that follow
    std::atomic<std::thread::id> running_; // whose run it is
    cudaStream_t                 run_stream_  = nullptr;
    double                       distance_    = 0.0; // since the last look, 1: it is time for the next
    bool                         conditional_ = false;
    mutable std::mutex           mutex_; // of what follows
    std::condition_variable      changed_;
    bool                         in_graph_ = false, resting_ = false, has_ended_event_ = false, served_ = false;
    std::atomic<bool>            ended_{ false }, idle_ended_{ false }, failed_{ false }, draining_{ false };
    std::atomic<uint32_t>        n_senders_{ 0 };
    CudaReceiverStats            stats_ = {};
    std::thread                  serving_, idling_;
};

} // namespace oa::weave::cuda
