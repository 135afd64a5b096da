#include "store.h"

#include "ggml-cpu.h"
#include "ggml.h"
#include "guest_sender.h"

#include <sys/mman.h>

namespace oa::weave {

namespace {

constexpr size_t   page       = 4096;
constexpr uint32_t max_places = 4096;

size_t up(size_t value, size_t unit) {
    return (value + unit - 1) / unit * unit;
}

bool is_kept(uint32_t type, uint32_t width) {
    if (type >= GGML_TYPE_COUNT || width == 0 || width > 1u << 20) {
        return false;
    }
    const bool converts = ggml_get_type_traits_cpu(ggml_type(type))->from_float || type == GGML_TYPE_F32;
    return converts && width % uint32_t(ggml_blck_size(ggml_type(type))) == 0;
}

} // namespace

Sequence::Sequence(const OpenTask & wanted) :
    made(wanted), k_row_(ggml_row_size(ggml_type(wanted.k_type), wanted.k_width)),
    v_row_(ggml_row_size(ggml_type(wanted.v_type), wanted.v_width)), k_nbytes_(up(k_row_ * wanted.max_tokens, page)),
    v_nbytes_(up(v_row_ * wanted.max_tokens, page)) {
    const size_t nbytes = made.n_layers * (k_nbytes_ + v_nbytes_);
    void * base = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    base_       = base == MAP_FAILED ? nullptr : static_cast<char *>(base);
    if (!base_) {
        throw std::bad_alloc();
    }
}

Sequence::~Sequence() {
    if (base_) {
        munmap(base_, made.n_layers * (k_nbytes_ + v_nbytes_));
    }
}

size_t Sequence::block_nbytes() const {
    return token_nbytes(made) * Store::block_tokens;
}

void Sequence::forget(uint32_t from, uint32_t to) const {
    for (uint32_t layer = 0; layer < made.n_layers; ++layer) {
        for (const auto & [data, row] : { std::pair(k(layer), k_row_), std::pair(v(layer), v_row_) }) {
            const size_t begin = up(from * row, page), end = up(to * row, page);
            if (end > begin) {
                madvise(data + begin, end - begin, MADV_DONTNEED);
            }
        }
    }
}

Status Store::open(const OpenTask & wanted, Handle & handle) {
    const bool sound = wanted.n_layers > 0 && wanted.n_layers <= 4096 && wanted.max_tokens > 0 &&
                       wanted.max_tokens <= 1u << 24 && is_kept(wanted.k_type, wanted.k_width) &&
                       is_kept(wanted.v_type, wanted.v_width);
    if (!sound) {
        return Status::malformed;
    }
    uint32_t at = 0;
    while (at < places_.size() && places_[at].sequence) {
        ++at;
    }
    if (at == max_places) {
        return Status::no_room;
    }
    if (at == places_.size()) {
        places_.emplace_back();
    }
    try {
        places_[at].sequence = std::make_unique<Sequence>(wanted);
    } catch (const std::bad_alloc &) {
        return Status::no_room;
    }
    handle = { at, ++places_[at].generation };
    n_sequences_.fetch_add(1, std::memory_order_relaxed);
    return Status::ok;
}

Sequence * Store::find(Handle handle) const {
    const bool there = handle.place < places_.size() && places_[handle.place].generation == handle.generation;
    return there ? places_[handle.place].sequence.get() : nullptr;
}

Status Store::reserve(Handle handle, uint32_t n_tokens) {
    Sequence * sequence = find(handle);
    if (!sequence) {
        return Status::unknown_sequence;
    }
    if (n_tokens > sequence->made.max_tokens) {
        return Status::no_room;
    }
    const size_t before = up(sequence->n_tokens, block_tokens) / block_tokens;
    const size_t after  = up(n_tokens, block_tokens) / block_tokens;
    if (after > before && (after - before) * sequence->block_nbytes() > free_nbytes()) {
        return Status::no_room;
    }
    if (n_tokens > sequence->n_tokens) {
        resize(*sequence, n_tokens);
    }
    return Status::ok;
}

Status Store::trim(Handle handle, uint32_t n_tokens) {
    Sequence * sequence = find(handle);
    if (!sequence) {
        return Status::unknown_sequence;
    }
    if (n_tokens < sequence->n_tokens) {
        const uint32_t before = sequence->n_tokens;
        resize(*sequence, n_tokens);
        if (n_tokens > 0) {
            sequence->forget(n_tokens, before);
        }
    }
    if (n_tokens == 0) {
        places_[handle.place].sequence.reset();
        n_sequences_.fetch_sub(1, std::memory_order_relaxed);
    }
    return Status::ok;
}

void Store::clear() {
    for (uint32_t at = 0; at < places_.size(); ++at) {
        if (places_[at].sequence) {
            trim({ at, places_[at].generation }, 0);
        }
    }
}

void Store::resize(Sequence & sequence, uint32_t n_tokens) {
    const size_t before = up(sequence.n_tokens, block_tokens) / block_tokens;
    const size_t after  = up(n_tokens, block_tokens) / block_tokens;
    sequence.n_tokens   = n_tokens;
    free_nbytes_.fetch_add((before - after) * sequence.block_nbytes(), std::memory_order_relaxed); // wraps to less
}

} // namespace oa::weave
