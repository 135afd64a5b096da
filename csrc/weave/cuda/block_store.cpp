#include "block_store.h"

#include <numeric>

namespace oa::weave::cuda {

namespace {

bool is_kept(const OpenTask & wanted) {
    const bool sound = wanted.n_layers > 0 && wanted.n_layers <= 4096 && wanted.max_tokens > 0 && wanted.k_width > 0 &&
                       wanted.k_width <= 1u << 20 && wanted.v_width > 0 && wanted.v_width <= 1u << 20;
    // Aligned to 16 bytes, whatever the heads.
    return sound && wanted.k_type == wanted.v_type && kv_token_nbytes(wanted.k_type, wanted.k_width) > 0 &&
           kv_token_nbytes(wanted.v_type, wanted.v_width) > 0 && wanted.k_width % chunk_values == 0 &&
           wanted.v_width % chunk_values == 0;
}

bool same_shape(const OpenTask & a, const OpenTask & b) {
    return a.n_layers == b.n_layers && a.k_type == b.k_type && a.v_type == b.v_type && a.k_width == b.k_width &&
           a.v_width == b.v_width;
}

uint32_t blocks_of(uint32_t n_tokens) {
    return (n_tokens + block_tokens - 1) / block_tokens;
}

} // namespace

BlockStore::BlockStore(size_t pool_nbytes, uint32_t pages_per_place, Upload upload) :
    pool_nbytes_(pool_nbytes), pages_per_place_(pages_per_place), upload_(std::move(upload)) {}

size_t BlockStore::free_nbytes() const {
    return n_blocks_ == 0 ? pool_nbytes_ : free_.size() * kv_block_nbytes(shape_);
}

Status BlockStore::open(const OpenTask & wanted, Handle & handle) {
    if (!is_kept(wanted) || (shape_.n_layers != 0 && !same_shape(wanted, shape_))) {
        return Status::malformed;
    }
    if (blocks_of(wanted.max_tokens) > pages_per_place_) {
        return Status::no_room;
    }
    uint32_t at = 0;
    while (at < max_places && places_[at].max_tokens != 0) {
        ++at;
    }
    if (at == max_places) {
        return Status::no_room;
    }
    if (shape_.n_layers == 0) {
        shape_    = wanted;
        n_blocks_ = uint32_t(std::min<size_t>(pool_nbytes_ / kv_block_nbytes(wanted), UINT32_MAX));
        free_.resize(n_blocks_);
        std::iota(free_.rbegin(), free_.rend(), 0u);
    }
    Sequence & sequence = places_[at];
    sequence.generation += sequence.generation == UINT32_MAX ? 2 : 1; // 0 is nobody's
    sequence.max_tokens = wanted.max_tokens;
    handle              = { at, sequence.generation };
    ++n_sequences_;
    tell(at);
    return Status::ok;
}

Status BlockStore::reserve(Handle handle, uint32_t n_tokens) {
    Sequence * sequence = find(handle);
    if (!sequence) {
        return Status::unknown_sequence;
    }
    const size_t before = sequence->blocks.size(), after = blocks_of(n_tokens);
    if (n_tokens > sequence->max_tokens || (after > before && after - before > free_.size())) {
        return Status::no_room;
    }
    if (n_tokens <= sequence->n_tokens) {
        return Status::ok;
    }
    for (size_t i = before; i < after; ++i) {
        sequence->blocks.push_back(free_.back());
        free_.pop_back();
    }
    sequence->n_tokens = n_tokens;
    if (after > before) {
        upload_.pages(handle.place, uint32_t(before), sequence->blocks.data() + before, uint32_t(after - before));
    }
    tell(handle.place);
    return Status::ok;
}

Status BlockStore::trim(Handle handle, uint32_t n_tokens) {
    Sequence * sequence = find(handle);
    if (!sequence) {
        return Status::unknown_sequence;
    }
    if (n_tokens < sequence->n_tokens) {
        sequence->n_tokens = n_tokens;
    }
    if (n_tokens == 0) {
        sequence->max_tokens = 0;
        --n_sequences_;
    }
    tell(handle.place);
    while (sequence->blocks.size() > blocks_of(sequence->n_tokens)) {
        free_.push_back(sequence->blocks.back());
        sequence->blocks.pop_back();
    }
    return Status::ok;
}

void BlockStore::clear() {
    for (uint32_t at = 0; at < max_places; ++at) {
        if (places_[at].max_tokens != 0) {
            trim({ at, places_[at].generation }, 0);
        }
    }
    shape_    = {};
    n_blocks_ = 0;
    free_.clear();
}

BlockStore::Sequence * BlockStore::find(Handle handle) {
    if (handle.place >= max_places) {
        return nullptr;
    }
    Sequence & sequence = places_[handle.place];
    return sequence.max_tokens != 0 && sequence.generation == handle.generation ? &sequence : nullptr;
}

// A place that is nobody's has no generation.
void BlockStore::tell(uint32_t place) {
    const Sequence & sequence = places_[place];
    upload_.place(place, { sequence.max_tokens == 0 ? 0 : sequence.generation, sequence.n_tokens });
}

} // namespace oa::weave::cuda
