#include "guest_channels.h"

#include "clock.h"
#include "llama-impl.h"

#include <algorithm>

namespace oa::weave {

namespace {

constexpr double first_pause_s = 0.1, longest_pause_s = 10.0; // between two tries to attach

} // namespace

std::optional<size_t> GuestChannels::with_most_room() {
    std::optional<size_t> best;
    for (size_t i = 0; i < n(); ++i) {
        if (takes_guests(i) && (!best || sender(i)->free_nbytes() > sender(*best)->free_nbytes())) {
            best = i;
        }
    }
    return best;
}

bool GuestChannels::takes_guests(size_t channel) {
    Channel & of = channels_[channel];
    if (!of.sender && oa_now() >= of.next_try_s) {
        try {
            of.sender  = std::make_unique<Sender>(options_.channels[channel], options_.sender);
            of.pause_s = first_pause_s;
            of.told    = false;
            LLAMA_LOG_INFO("%s: attention of sequences from %d on: %s\n", __func__, options_.first_guest,
                           options_.channels[channel].c_str());
        } catch (const ChannelError & error) {
            rest(of);
            if (!of.told) {
                LLAMA_LOG_WARN("%s: no guests: %s\n", __func__, error.what());
                of.told = true;
            }
        }
    }
    return of.sender && of.sender->wants_guests();
}

bool GuestChannels::keeps_guests(size_t channel) {
    Channel & of = channels_[channel];
    if (!of.sender) {
        return false;
    }
    of.sender->lives();
    if (of.sender->failed()) {
        LLAMA_LOG_WARN("%s: %s; its guests are computed here\n", __func__, of.sender->error().c_str());
        waited_s_ += of.sender->waited_s();
        of.sender.reset();
        rest(of);
        return false;
    }
    return of.sender->wants_guests();
}

void GuestChannels::rest(Channel & of) const {
    of.next_try_s = oa_now() + of.pause_s;
    of.pause_s    = std::min(2 * of.pause_s, longest_pause_s);
}

double GuestChannels::waited_s() const {
    double all = waited_s_;
    for (const auto & channel : channels_) {
        all += channel.sender ? channel.sender->waited_s() : 0.0;
    }
    return all;
}

} // namespace oa::weave
