// Guests' sequences in blocks of a device's memory: who has which blocks. The host's part; Store (store.h) is the same
// for the CPU.
//
// All sequences of a sender keep the same shape of K and V, that of the first it opens: the pool is cut into blocks for
// it. Everything that polls read of it is told through `Upload`, in an order in which no poll reads a block that is not
// the sequence's: pages before the room that needs them.
#pragma once

#include "receiver_state.h"

#include <functional>
#include <vector>

namespace oa::weave::cuda {

class BlockStore {
  public:
    // Copies to the device; when it returns, polls that begin to read see it.
    struct Upload {
        std::function<void(uint32_t place, const Place & now)>                                  place;
        std::function<void(uint32_t place, uint32_t first, const uint32_t * pages, uint32_t n)> pages;
    };

    // `pool_nbytes` of device memory; `max_tokens` of a sequence are at most pages_per_place blocks.
    BlockStore(size_t pool_nbytes, uint32_t pages_per_place, Upload upload);

    Status open(const OpenTask & wanted, Handle & handle);
    Status reserve(Handle handle, uint32_t n_tokens);
    Status trim(Handle handle, uint32_t n_tokens); // of zero tokens it is forgotten
    void   clear();                                // everything, the shape too

    // Of all sequences; n_layers 0: none yet. Polls that begin to read a sequence must have been given it (Setup).
    const OpenTask & shape() const { return shape_; }
    uint32_t         n_blocks() const { return n_blocks_; } // of the pool
    size_t           free_nbytes() const;
    uint32_t         n_sequences() const { return n_sequences_; }

  private:
    struct Sequence {
        uint32_t              generation = 0, n_tokens = 0, max_tokens = 0; // max_tokens 0: nobody's
        std::vector<uint32_t> blocks;
    };

    Sequence * find(Handle handle);
    void       tell(uint32_t place);

    const size_t          pool_nbytes_;
    const uint32_t        pages_per_place_;
    const Upload          upload_;
    OpenTask              shape_       = {};
    uint32_t              n_blocks_    = 0;
    uint32_t              n_sequences_ = 0;
    std::vector<uint32_t> free_;
    std::vector<Sequence> places_{ max_places };
};

} // namespace oa::weave::cuda
