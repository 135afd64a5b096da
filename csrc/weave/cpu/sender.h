// The hot model's side of a channel: gives guest sequences to a receiver and fetches their attention.
//
// Nothing waits for longer than its deadline. A receiver that does not answer in time, is gone, stopped, or answers
// wrongly has failed: from then on every call says so at once, and the caller attaches anew. Calls do not overlap.
#pragma once

#include "guest_sender.h"
#include "region.h"
#include "ring.h"
#include "rules.h"

#include <string>
#include <vector>

namespace oa::weave {

// Attention of a layer: rows of q, k, v are contiguous, and follow each other at the given distance in floats. With
// task.n_head = 0 K and V are appended, and nothing else; there is no q and no out.
struct Attention {
    AttendTask           task; // n_rows and n_sequences are those of `rows`
    const SequenceRows * rows;
    const float *        sinks; // n_head, or null
    const float *        q;
    const float *        k;
    const float *        v;
    size_t               q_stride, k_stride, v_stride;
    float *              out; // n_rows x n_head x d_v, until receive()
};

class Sender final : public GuestSender {
  public:
    // Throws ChannelError; a task through the channel and back has been seen to work.
    Sender(const std::string & path, const SenderOptions & options);

    bool                failed() const { return !error_.empty(); }
    const std::string & error() const override { return error_; }

    // Looks at memory only.
    bool   wants_guests() const override;
    size_t free_nbytes() const override { return region_.load_acquire<uint64_t>(word::free_nbytes); }
    // Whether the receiver lives and moves; failed() if not. Looks at memory only, but once every 10 ms.
    bool lives() override;

    Status open(const OpenTask & wanted, Handle & handle) override;
    Status reserve(Handle handle, uint32_t n_tokens) override;
    Status trim(Handle handle, uint32_t n_tokens) override;

    // Hand over rows of a layer; false: failed. It waits only where all slots are taken. What goes wrong with K and V
    // alone is found out by a later call, before any result that needs them.
    bool send(const Attention & wanted);
    // Wait until the attention of all that was sent is in `out`; false: failed, `out` is void.
    bool receive();

    // For results, and for free slots.
    double waited_s() const override { return waited_s_; }

  private:
    struct Sent {
        uint32_t number;
        float *  out;
        size_t   n_floats;
    };

    bool   begin_task(size_t nbytes);
    void   publish(Kind kind, size_t nbytes);
    bool   take_result(uint32_t number, void * to, size_t nbytes, Status & status);
    Status call(Kind kind, const void * task, size_t nbytes, void * result, size_t result_nbytes);
    bool   await(uint32_t number, double seconds);
    bool   await_oldest();
    bool   awaits_rows() const;
    bool   send_part(const Attention & wanted, uint32_t first, uint32_t n_rows);
    bool   fail(const std::string & why);

    const SenderOptions options_;
    const std::string   path_;
    Region              region_;
    SenderRing<Region>  ring_;
    std::vector<char>   task_; // the payload of the next one, in private memory
    std::vector<Sent>   sent_;
    std::string         error_;
    bool                attached_ = false;
    double              waited_s_ = 0.0;
    uint32_t            beat_     = 0;
    double              beat_at_ = 0.0, looked_at_ = 0.0;
};

} // namespace oa::weave
