// What the cache of a hot model asks of a channel's sender, on the CPU (sender.h) or on a device (cuda/sender_cuda.h).
#pragma once

#include "protocol.h"

#include <memory>
#include <string>
#include <vector>

namespace oa::weave {

struct SenderOptions {
    double   attach_s   = 2.0; // the receiver may be amidst a long operator
    double   deadline_s = 0.1; // of a task; half of it without a sign of life is as bad
    uint32_t base       = 0;   // of the numbers of tasks
};

// Bytes of a token's K and V in all layers, by which receivers count.
size_t token_nbytes(const OpenTask & shape);

class GuestSender {
  public:
    virtual ~GuestSender() = default;

    // Whether the receiver lives; if not, error() says why, and it has failed for good.
    virtual bool                lives()       = 0;
    virtual const std::string & error() const = 0;

    // Whether the receiver can be given more sequences.
    virtual bool   wants_guests() const = 0;
    virtual size_t free_nbytes() const  = 0;
    // Seconds of waiting for results so far.
    virtual double waited_s() const = 0;

    virtual Status open(const OpenTask & wanted, Handle & handle) = 0;
    virtual Status reserve(Handle handle, uint32_t n_tokens)      = 0;
    virtual Status trim(Handle handle, uint32_t n_tokens)         = 0;

    // On a device: by it the operators of a graph say whose they are (guest_op.h); another sender, another number.
    virtual uint32_t number() const { return 0; }
    // On a device: the rows of the next graph.
    virtual void set_rows(const std::vector<SequenceRows> &) {}
};

// What the registry of a backend has under this name: a sender on its device of that index. Throws ChannelError.
constexpr const char * new_sender_name = "oa_weave_new_sender";
using NewSender = std::unique_ptr<GuestSender>(int device, const std::string & path, const OpenTask & shape,
                                               const SenderOptions & options);

} // namespace oa::weave
