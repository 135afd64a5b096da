#include "guest_channels.h"

#include "clock.h"
#include "llama-impl.h"

#include <algorithm>
#include <sys/stat.h>

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
            of.sender  = attach(options_.channels[channel]);
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

// A file is a receiver's on the CPU, a socket one's on a GPU.
std::unique_ptr<GuestSender> GuestChannels::attach(const std::string & path) const {
    struct stat about;
    if (stat(path.c_str(), &about) == 0 && S_ISSOCK(about.st_mode)) {
        return attach_device(path);
    }
    return std::make_unique<Sender>(path, options_.sender);
}

// By the registry of the device's backend, which libllama does not link.
std::unique_ptr<GuestSender> GuestChannels::attach_device(const std::string & path) const {
    const auto reg  = device_ ? ggml_backend_dev_backend_reg(device_) : nullptr;
    const auto make = reg ? ggml_backend_reg_get_proc_address(reg, new_sender_name) : nullptr;
    if (!make) {
        throw ChannelError("the receiver of " + path +
                           " is on a GPU, so all of the KV cache has to be on one CUDA device");
    }
    if (n() > 1) {
        throw ChannelError("the receiver of " + path + " is on a GPU, so it has to be the only channel");
    }
    int index = 0;
    while (ggml_backend_reg_dev_get(reg, size_t(index)) != device_) {
        ++index;
    }
    return reinterpret_cast<NewSender *>(make)(index, path, shape_, options_.sender);
}

Sender * GuestChannels::host_sender(size_t channel) const {
    GuestSender * of = sender(channel);
    GGML_ASSERT(!of || of->number() == 0);
    return static_cast<Sender *>(of);
}

bool GuestChannels::keeps_guests(size_t channel) {
    Channel & of = channels_[channel];
    if (!of.sender) {
        return false;
    }
    if (!of.sender->lives()) {
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
