// The micro-batches of a hot model's cache: the order of their rows, and what of them goes to receivers and comes back.
#include "cpu_functions.h"
#include "guest_cache.h"
#include "guest_rows.h"
#include "own_attention.h"

#include <algorithm>

namespace oa::weave {

namespace {

constexpr size_t tiled_rows     = 64;  // ggml-cpu's GGML_FA_TILE_Q
constexpr size_t chunked_tokens = 512; // from which ggml-cpu cuts a single row's tokens
constexpr size_t padding        = 256; // of the tokens that llama.cpp's cache shows

} // namespace

llama_memory_context_ptr GuestCache::init_batch(llama_batch_allocr & balloc, uint32_t n_ubatch, bool embd_all) {
    GGML_UNUSED(embd_all);
    const llama_batch &               batch = balloc.get_batch();
    std::map<llama_seq_id, llama_pos> after;
    std::set<llama_seq_id>            shared;
    for (int32_t i = 0; i < batch.n_tokens; ++i) {
        for (int32_t j = 0; j < batch.n_seq_id[i]; ++j) {
            const llama_seq_id seq_id = batch.seq_id[i][j];
            after[seq_id]             = std::max(after[seq_id], batch.pos[i] + 1);
            if (batch.n_seq_id[i] > 1 || batch.embd) {
                shared.insert(seq_id); // only the local cache knows tokens of several sequences, or without a number
            }
        }
    }
    look_after_channels();
    bool all_here = true;
    for (const auto & [seq_id, n_tokens] : after) {
        if (!is_guest(seq_id) && (shared.count(seq_id) || !becomes_guest(seq_id))) {
            continue;
        }
        Guest & guest = guests_.at(seq_id);
        if (!guest.lost && shared.count(seq_id)) {
            lose(guest, Loss::shared);
        } else if (!guest.lost && !has_room(guest, uint32_t(n_tokens))) {
            GuestSender * sender = channels_.sender(guest.channel);
            lose(guest, sender && sender->lives() ? Loss::no_room : Loss::failed);
        }
        if (guest.lost && guest.tokens.empty()) {
            guests_.erase(seq_id); // nothing of it is there yet
        } else {
            all_here = all_here && !guest.lost;
        }
    }

    std::vector<GuestBatch>   batches;
    std::vector<llama_ubatch> locals;
    balloc.split_reset();
    while (all_here) {
        auto ubatch = balloc.split_simple(n_ubatch);
        if (ubatch.n_tokens == 0) {
            break;
        }
        const auto all_new = new_guests(ubatch);
        sort_rows(ubatch, balloc.get_out_ids(),
                  [&](llama_seq_id seq_id) { return order_of(seq_id, all_new.count(seq_id) != 0); });
        uint32_t n_local = 0, n_new = 0;
        for (uint32_t i = 0; i < ubatch.n_tokens; ++i) {
            n_local += !is_guest(ubatch.seq_id[i][0]);
            n_new += all_new.count(ubatch.seq_id[i][0]) != 0;
        }
        batches.push_back({ ubatch, n_local, n_new });
        if (n_local > 0) {
            ubatch.n_tokens = ubatch.n_seqs = n_local;
            locals.push_back(std::move(ubatch));
        }
    }
    slot_info_vec_t sinfos;
    if (!locals.empty()) {
        sinfos = prepare(locals);
    }
    if (!all_here || (sinfos.empty() && !locals.empty())) {
        return std::make_unique<llama_kv_cache_context>(LLAMA_MEMORY_STATUS_FAILED_PREPARE);
    }
    return std::make_unique<GuestContext>(this, std::move(batches), std::move(sinfos), std::move(locals));
}

int32_t GuestCache::order_of(llama_seq_id seq_id, bool is_new) const {
    const auto found = guests_.find(seq_id);
    if (found == guests_.end()) {
        return 0;
    }
    const size_t group = found->second.channel + (is_new ? 0 : channels_.n());
    return 1 + int32_t(group) * LLAMA_MAX_SEQ + seq_id;
}

// Guests whose tokens in the micro-batch are their first ones. On a device all attention is the receiver's.
std::set<llama_seq_id> GuestCache::new_guests(const llama_ubatch & ubatch) const {
    std::map<llama_seq_id, llama_pos> next;
    std::set<llama_seq_id>            others;
    for (uint32_t i = 0; i < ubatch.n_tokens; ++i) {
        const llama_seq_id seq_id = ubatch.seq_id[i][0];
        const auto         found  = guests_.find(seq_id);
        if (found == guests_.end()) {
            continue;
        }
        const GuestSender * sender = channels_.sender(found->second.channel);
        if (!sender || sender->number() != 0 || ubatch.pos[i] != next[seq_id]++) {
            others.insert(seq_id);
        }
    }
    std::set<llama_seq_id> all;
    for (const auto & [seq_id, unused] : next) {
        if (others.count(seq_id) == 0) {
            all.insert(seq_id);
        }
    }
    return all;
}

// The rows begin .. end - 1 by channel; a part's first row counts from `begin`.
std::vector<GuestCache::Part> GuestCache::parts_of(const llama_ubatch & ubatch, uint32_t begin, uint32_t end) const {
    std::vector<Part> parts;
    for (uint32_t i = begin; i < end; ++i) {
        const Guest &  guest    = guests_.at(ubatch.seq_id[i][0]);
        const uint32_t position = uint32_t(ubatch.pos[i]);
        if (parts.empty() || parts.back().channel != guest.channel) {
            parts.push_back({ guest.channel, i - begin, 0, {} });
        }
        Part & part = parts.back();
        ++part.n_rows;
        const bool follows =
            i > begin && ubatch.seq_id[i][0] == ubatch.seq_id[i - 1][0] && position == uint32_t(ubatch.pos[i - 1]) + 1;
        if (follows) {
            ++part.rows.back().n_rows;
        } else {
            part.rows.push_back({ guest.handle, position, 1 });
        }
    }
    return parts;
}

void GuestCache::apply_guests(const llama_ubatch & ubatch, uint32_t n_local, uint32_t n_new) {
    for (uint32_t i = n_local; i < ubatch.n_tokens; ++i) {
        Guest & guest = guests_.at(ubatch.seq_id[i][0]);
        guest.tokens.resize(size_t(ubatch.pos[i]));
        guest.tokens.push_back(ubatch.token[i]);
    }
    n_rows_              = ubatch.n_tokens;
    new_parts_           = parts_of(ubatch, n_local, n_local + n_new);
    parts_               = parts_of(ubatch, n_local + n_new, ubatch.n_tokens);
    GuestSender * sender = parts_.empty() ? nullptr : channels_.sender(parts_[0].channel);
    sender_number_       = sender ? sender->number() : 0;
    if (sender_number_ != 0) { // the only channel
        sender->set_rows(parts_[0].rows);
        stats_.n_rows += uint64_t(parts_[0].n_rows) * layers_.size();
        guest_totals().rows += uint64_t(parts_[0].n_rows) * layers_.size();
    }
}

uint32_t GuestCache::own_attention(const AttendTask & of_layer) const {
    if (!own_attention_ || sender_number_ != 0) {
        return 0;
    }
    return OA_OF_CPU(oa_attend_alone)(kept_as(type_k()), kept_as(type_v()), of_layer.d_k, of_layer.d_v);
}

void GuestCache::send(const Attention & wanted, uint32_t n_threads) {
    out_row_       = size_t(wanted.task.n_head) * wanted.task.d_v;
    out_           = wanted.out;
    const bool f16 = kept_as(type_k()) == GGML_TYPE_F16 && kept_as(type_v()) == GGML_TYPE_F16;
    for (const Part & part : parts_) {
        Sender *  sender        = channels_.host_sender(part.channel);
        Attention mine          = wanted;
        mine.task.n_rows        = part.n_rows;
        mine.task.n_sequences   = uint32_t(part.rows.size());
        mine.task.tiled         = f16 && n_rows_ >= tiled_rows && !mine.task.own;
        mine.task.n_chunks      = 1;
        const uint32_t n_padded = std::min<uint32_t>(get_size(), GGML_PAD(part.rows[0].position + 1, padding));
        if (f16 && n_rows_ == 1 && n_padded >= chunked_tokens && !mine.task.own) {
            mine.task.n_chunks = n_threads;
            mine.task.n_padded = n_padded;
        }
        mine.rows = part.rows.data();
        mine.q += part.first * wanted.q_stride;
        mine.k += part.first * wanted.k_stride;
        mine.v += part.first * wanted.v_stride;
        mine.out += part.first * out_row_;
        if (sender) {
            sender->send(mine);
            guest_totals().rows += part.n_rows;
        }
        stats_.n_rows += part.n_rows;
    }
}

void GuestCache::append(const Attention & wanted) {
    for (const Part & part : new_parts_) {
        Sender *  sender      = channels_.host_sender(part.channel);
        Attention mine        = wanted;
        mine.task.n_head      = 0;
        mine.task.n_rows      = part.n_rows;
        mine.task.n_sequences = uint32_t(part.rows.size());
        mine.task.tiled       = 0;
        mine.task.own         = 0;
        mine.task.n_chunks    = 1;
        mine.rows             = part.rows.data();
        mine.k += part.first * wanted.k_stride;
        mine.v += part.first * wanted.v_stride;
        if (!sender || !sender->send(mine)) {
            lose_guests_of(part.channel, Loss::failed);
            continue;
        }
        guest_totals().appended_rows += part.n_rows;
        stats_.n_appended += part.n_rows;
    }
}

void GuestCache::receive() {
    for (const Part & part : parts_) {
        Sender * sender = channels_.host_sender(part.channel);
        if (!sender || !sender->receive()) {
            std::fill_n(out_ + part.first * out_row_, part.n_rows * out_row_, 0.0f);
            lose_guests_of(part.channel, Loss::failed);
        }
    }
}

} // namespace oa::weave
