// The KV cache of guest sequences in the receiver's memory.
//
// A sequence has one range of addresses, as long as its context allows: K of every layer, then V. Memory is used only
// where tokens are: the kernel gives pages as they are first written, and gets them back on trim. What may be used is
// counted in blocks of tokens against a quota. A place that is used again has another generation.
#pragma once

#include "protocol.h"

#include <atomic>
#include <memory>
#include <vector>

namespace oa::weave {

class Sequence {
  public:
    explicit Sequence(const OpenTask & wanted);
    ~Sequence();

    Sequence(const Sequence &)             = delete;
    Sequence & operator=(const Sequence &) = delete;

    char * k(uint32_t layer) const { return base_ + layer * (k_nbytes_ + v_nbytes_); }
    char * v(uint32_t layer) const { return k(layer) + k_nbytes_; }

    size_t block_nbytes() const; // of all layers
    void   forget(uint32_t from, uint32_t to) const;

    OpenTask made;
    uint32_t n_tokens = 0; // there is room for

  private:
    size_t k_row_ = 0, v_row_ = 0, k_nbytes_ = 0, v_nbytes_ = 0;
    char * base_ = nullptr;
};

class Store {
  public:
    static constexpr uint32_t block_tokens = 64;

    explicit Store(size_t quota_nbytes) : quota_nbytes_(quota_nbytes), free_nbytes_(quota_nbytes) {}

    Status open(const OpenTask & wanted, Handle & handle);
    Status reserve(Handle handle, uint32_t n_tokens);
    Status trim(Handle handle, uint32_t n_tokens);
    void   clear();

    // Null: there is none of that generation.
    Sequence * find(Handle handle) const;

    size_t   quota_nbytes() const { return quota_nbytes_; }
    size_t   free_nbytes() const { return free_nbytes_.load(std::memory_order_relaxed); }
    uint32_t n_sequences() const { return n_sequences_.load(std::memory_order_relaxed); }

  private:
    struct Place {
        uint32_t                  generation = 0;
        std::unique_ptr<Sequence> sequence;
    };

    void resize(Sequence & sequence, uint32_t n_tokens);

    const size_t          quota_nbytes_;
    std::atomic<size_t>   free_nbytes_;
    std::atomic<uint32_t> n_sequences_{ 0 };
    std::vector<Place>    places_;
};

} // namespace oa::weave
