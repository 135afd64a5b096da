// The hot model's side of a channel on a GPU: hands rows of guest sequences to a receiver and fetches their attention,
// layer by layer, without its host.
//
// An iteration: plan() says whose tokens its rows are; then, of every layer, send() and receive() are launches on the
// model's stream, which may be captured once and replayed with other plans. After the stream has been waited for,
// lives() says whether the results are any good. A receiver that has failed once has failed for good: attach anew.
#pragma once

#include "control.h"
#include "guest_sender.h"
#include "send_cuda.h"

#include <string>

namespace oa::weave::cuda {

// Attention of one layer: of rows of the iteration's plan, in device memory. Heads of a row follow each other.
struct CudaAttention {
    AttendTask    task;  // n_rows: of the plan; n_sequences, has_sinks are found out
    const float * sinks; // n_head, or null
    const float * q;     // on 16 bytes, as k, v, out and the strides
    const float * k;
    const float * v;
    size_t        q_stride, k_stride, v_stride; // floats from row to row
    float *       out;                          // n_rows x n_head x d_v, from receive() on

    size_t out_stride() const { return size_t(task.n_head) * task.d_v; }
};

class CudaSender : public GuestSender {
  public:
    // `shape`: of all sequences; its max_tokens is one's upper bound. Throws ChannelError; a task there and back has
    // been seen to work, by the first way of sharing memory that does.
    CudaSender(const std::string & path, const OpenTask & shape, int device, const SenderOptions & options);
    // All launches have ended.
    ~CudaSender() override;

    CudaSender(const CudaSender &)             = delete;
    CudaSender & operator=(const CudaSender &) = delete;

    // Looks at memory of the host only, but at the line to the receiver.
    bool                lives() override;
    const std::string & error() const override { return error_; }
    bool                wants_guests() const override { return error_.empty() && !draining_; } // as of the last answer
    size_t              free_nbytes() const override { return free_nbytes_; }                  // as of the last answer
    double              waited_s() const override;                                             // of the device
    Way                 way() const { return inbox_->handle().way; }

    // Between iterations.
    Status open(const OpenTask & wanted, Handle & handle) override;
    Status reserve(Handle handle, uint32_t n_tokens) override;
    Status trim(Handle handle, uint32_t n_tokens) override;

    // Rows of the next iteration, sequence by sequence: at most max_sequences. Earlier on `stream` is done with the
    // last plan. Not captured.
    void plan(const SequenceRows * rows, uint32_t n_sequences, cudaStream_t stream);
    // Rows leave, cut into tasks as slots have room. Throws ChannelError: a row has no room in a slot, or is
    // misaligned.
    void send(const CudaAttention & wanted, cudaStream_t stream);
    // What send() was given last: all of it is in its place, or zeros are. Nothing is remembered in between, so that
    // either may be captured without the other.
    void receive(const CudaAttention & sent, cudaStream_t stream);

    // It has failed; the device stops waiting at once.
    void give_up(const std::string & why);

  private:
    void   look();
    void   attach(const OpenTask & shape, Way way);
    Answer ask(Question & question, int file, int & answered);
    Status change(Ask ask, Handle handle, uint32_t n_tokens);
    void   fail(const std::string & why);
    void   let_go();

    uint32_t rows_of_a_task(const CudaAttention & wanted) const;
    void     fetch(const CudaAttention & sent, uint32_t first, cudaStream_t stream);

    const int                     device_;
    const SenderOptions           options_;
    const std::string             path_;
    Line                          line_;
    std::unique_ptr<SharedMemory> inbox_, outbox_;
    SenderState *                 state_       = nullptr; // of the device
    SenderReport *                report_      = nullptr; // of the host, pinned, as plan_
    SendPlan *                    plan_        = nullptr;
    cudaEvent_t                   planned_     = nullptr; // plan_ has been copied
    uint32_t                      n_slots_     = 0;
    uint64_t                      task_nbytes_ = 0, result_nbytes_ = 0;
    size_t                        free_nbytes_ = 0;
    bool                          draining_    = false;
    std::string                   error_;
};

} // namespace oa::weave::cuda
