#include "guest_cache.h"

#include "llama-hparams.h"
#include "llama-impl.h"
#include "store.h"

#include <algorithm>

namespace oa::weave {

GuestCache::~GuestCache() {
    clear(false);
}

bool GuestCache::becomes_guest(llama_seq_id seq_id) {
    if (seq_id < options_.first_guest || seq_id == coming_home || llama_kv_cache::seq_pos_max(seq_id) >= 0) {
        return false;
    }
    const auto channel = channels_.with_most_room();
    if (!channel) {
        return false;
    }
    Guest guest   = {};
    guest.channel = *channel;
    if (channels_.sender(*channel)->open(shape(), guest.handle) != Status::ok) {
        return false;
    }
    guests_.emplace(seq_id, std::move(guest));
    ++stats_.n_guests;
    ++guest_totals().came;
    ++guest_totals().now;
    return true;
}

OpenTask GuestCache::shape() const {
    OpenTask shape   = {};
    shape.n_layers   = uint32_t(hparams_.n_layer());
    shape.max_tokens = get_size();
    shape.k_type     = uint32_t(kept_as(type_k()));
    shape.v_type     = uint32_t(kept_as(type_v()));
    for (uint32_t il = 0; il < shape.n_layers; ++il) {
        shape.k_width = std::max(shape.k_width, hparams_.n_embd_k_gqa(il));
        shape.v_width = std::max(shape.v_width, hparams_.n_embd_v_gqa(il));
    }
    return shape;
}

bool GuestCache::has_room(uint32_t n_tokens) {
    const auto   channel = channels_.with_most_room();
    const size_t n       = std::min<size_t>(get_size(), GGML_PAD(n_tokens, Store::block_tokens));
    return channel && channels_.sender(*channel)->free_nbytes() >= n * token_nbytes(shape());
}

// Guests of a receiver that has failed, or wants its memory back, are lost.
void GuestCache::look_after_channels() {
    for (size_t i = 0; i < channels_.n(); ++i) {
        if (!channels_.keeps_guests(i)) {
            lose_guests_of(i, channels_.sender(i) ? Loss::called_back : Loss::failed);
        }
    }
    const auto waited_ns = uint64_t(1e9 * channels_.waited_s());
    guest_totals().waited_ns += waited_ns - told_waited_ns_;
    told_waited_ns_ = waited_ns;
}

void GuestCache::lose_guests_of(size_t channel, Loss why) {
    for (auto & [seq_id, guest] : guests_) {
        if (!guest.lost && guest.channel == channel) {
            lose(guest, why);
        }
    }
}

// The receiver forgets it at once: later its handle may be another sequence's, of the next receiver.
void GuestCache::lose(Guest & guest, Loss why) {
    let_go(guest, 0);
    guest.lost = true;
    ++guest_totals().lost[int(why)];
}

bool GuestCache::has_room(Guest & guest, uint32_t n_tokens) {
    if (n_tokens <= guest.n_reserved) {
        return true;
    }
    GuestSender *  sender = channels_.sender(guest.channel);
    const uint32_t wanted = std::min<uint32_t>(get_size(), GGML_PAD(n_tokens, Store::block_tokens));
    if (!sender || n_tokens > wanted || sender->reserve(guest.handle, wanted) != Status::ok) {
        return false;
    }
    guest.n_reserved = wanted;
    return true;
}

// The receiver keeps so many tokens of a guest; of none, it forgets it. It has nothing of one that is lost.
void GuestCache::let_go(Guest & guest, uint32_t n_tokens) {
    if (guest.lost) {
        return;
    }
    GuestSender *  sender = channels_.sender(guest.channel);
    const uint32_t kept =
        n_tokens == 0 ? 0 : std::min(guest.n_reserved, uint32_t(GGML_PAD(n_tokens, Store::block_tokens)));
    if (sender && (n_tokens == 0 || kept < guest.n_reserved)) {
        sender->trim(guest.handle, kept);
    }
    guest.n_reserved = kept;
    guest_totals().now -= n_tokens == 0;
}

bool GuestCache::is_lost(llama_seq_id seq_id) const {
    const auto found = guests_.find(seq_id);
    return found != guests_.end() && found->second.lost;
}

std::vector<llama_token> GuestCache::take_back(llama_seq_id seq_id) {
    const auto found = guests_.find(seq_id);
    if (found == guests_.end() || !found->second.lost) {
        return {};
    }
    auto tokens = std::move(found->second.tokens);
    guests_.erase(found);
    ++stats_.n_lost;
    return tokens;
}

void GuestCache::put_back(llama_seq_id seq_id, std::vector<llama_token> tokens) {
    seq_rm(seq_id, -1, -1);
    Guest guest  = {};
    guest.lost   = true;
    guest.tokens = std::move(tokens);
    guests_.emplace(seq_id, std::move(guest));
    --stats_.n_lost;
}

ggml_backend_dev_t GuestCache::device() const {
    const auto parts = memory_breakdown();
    return parts.size() == 1 ? ggml_backend_buft_get_device(parts.begin()->first) : nullptr;
}

void GuestCache::look_after_device() {
    for (size_t i = 0; i < channels_.n(); ++i) {
        GuestSender * sender = channels_.sender(i);
        if (sender && sender->number() != 0 && !sender->lives()) {
            lose_guests_of(i, Loss::failed);
        }
    }
}

GuestStats GuestCache::stats() const {
    GuestStats stats = stats_;
    stats.waited_s   = channels_.waited_s();
    return stats;
}

void GuestCache::clear(bool data) {
    while (!guests_.empty()) {
        seq_rm(guests_.begin()->first, -1, -1);
    }
    llama_kv_cache::clear(data);
}

bool GuestCache::seq_rm(llama_seq_id seq_id, llama_pos p0, llama_pos p1) {
    if (seq_id < 0) {
        std::vector<llama_seq_id> all;
        for (const auto & [guest, unused] : guests_) {
            all.push_back(guest);
        }
        for (llama_seq_id guest : all) {
            seq_rm(guest, p0, p1);
        }
        return llama_kv_cache::seq_rm(seq_id, p0, p1);
    }
    const auto found = guests_.find(seq_id);
    if (found == guests_.end()) {
        return llama_kv_cache::seq_rm(seq_id, p0, p1);
    }
    Guest &         guest = found->second;
    const llama_pos n     = llama_pos(guest.tokens.size());
    if (p1 >= 0 && p1 < n) {
        return false; // only an end can go
    }
    if (p0 <= 0) {
        let_go(guest, 0);
        guests_.erase(found);
    } else if (p0 < n) {
        guest.tokens.resize(size_t(p0));
        let_go(guest, uint32_t(p0));
    }
    return true;
}

// A copy of a guest is computed anew when it is needed.
void GuestCache::seq_cp(llama_seq_id from, llama_seq_id to, llama_pos p0, llama_pos p1) {
    const auto found = guests_.find(from);
    if (found == guests_.end() || from == to) {
        return llama_kv_cache::seq_cp(from, to, p0, p1);
    }
    seq_rm(to, -1, -1);
    const auto & tokens = found->second.tokens;
    const size_t end    = p1 < 0 ? tokens.size() : std::min(tokens.size(), size_t(p1));
    if (p0 <= 0 && end > 0) {
        Guest copy   = {};
        copy.channel = found->second.channel;
        copy.lost    = true;
        copy.tokens.assign(tokens.begin(), tokens.begin() + ptrdiff_t(end));
        guests_.emplace(to, std::move(copy));
    }
}

void GuestCache::seq_keep(llama_seq_id seq_id) {
    std::vector<llama_seq_id> others;
    for (const auto & [guest, unused] : guests_) {
        if (guest != seq_id) {
            others.push_back(guest);
        }
    }
    for (llama_seq_id other : others) {
        seq_rm(other, -1, -1);
    }
    llama_kv_cache::seq_keep(seq_id);
}

llama_pos GuestCache::seq_pos_min(llama_seq_id seq_id) const {
    const auto found = guests_.find(seq_id);
    if (found == guests_.end()) {
        return llama_kv_cache::seq_pos_min(seq_id);
    }
    return found->second.tokens.empty() ? -1 : 0;
}

llama_pos GuestCache::seq_pos_max(llama_seq_id seq_id) const {
    const auto found = guests_.find(seq_id);
    return found == guests_.end() ? llama_kv_cache::seq_pos_max(seq_id) : llama_pos(found->second.tokens.size()) - 1;
}

void GuestCache::state_write(llama_io_write_i & io, llama_seq_id seq_id, llama_state_seq_flags flags) const {
    if (seq_id < 0 ? !guests_.empty() : is_guest(seq_id)) {
        throw std::runtime_error("sequences whose KV cache is with a receiver cannot be saved");
    }
    llama_kv_cache::state_write(io, seq_id, flags);
}

void GuestCache::state_read(llama_io_read_i & io, llama_seq_id seq_id, llama_state_seq_flags flags) {
    if (is_guest(seq_id)) {
        seq_rm(seq_id, -1, -1);
    }
    llama_kv_cache::state_read(io, seq_id, flags);
}

} // namespace oa::weave
