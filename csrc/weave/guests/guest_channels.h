// The receivers that a hot model may have guests with: who is there, who takes more, when to try again.
#pragma once

#include "ggml-backend.h"
#include "sender.h"

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace oa::weave {

struct GuestOptions {
    std::vector<std::string> channels;
    int32_t                  first_guest = 0; // number of a sequence
    SenderOptions            sender;
};

class GuestChannels {
  public:
    // shape: of all guests. device: the one that has all of their model's KV cache, or null.
    GuestChannels(const GuestOptions & options, const OpenTask & shape, ggml_backend_dev_t device) :
        options_(options), shape_(shape), device_(device), channels_(options.channels.size()) {}

    size_t n() const { return channels_.size(); }
    // Null: it has none now.
    GuestSender * sender(size_t channel) const { return channels_[channel].sender.get(); }
    // The same, of a channel on the CPU.
    Sender * host_sender(size_t channel) const;

    // Of those that take guests the one with most memory left; attaches where that is due.
    std::optional<size_t> with_most_room();
    // False: the receiver has failed, or wants its memory back. A failed one is tried again later.
    bool keeps_guests(size_t channel);

    double waited_s() const;

  private:
    struct Channel {
        std::unique_ptr<GuestSender> sender;
        double                       next_try_s = 0.0, pause_s = 0.1;
        bool                         told = false;
    };

    bool takes_guests(size_t channel);
    void rest(Channel & of) const;

    std::unique_ptr<GuestSender> attach(const std::string & path) const;
    std::unique_ptr<GuestSender> attach_device(const std::string & path) const;

    const GuestOptions       options_;
    const OpenTask           shape_;
    const ggml_backend_dev_t device_;
    std::vector<Channel>     channels_;
    double                   waited_s_ = 0.0; // with senders that are gone
};

} // namespace oa::weave
