// The micro-batches of a decode with guests, in order. As a context of the KV cache it is that of the local rows.
#pragma once

#include "llama-kv-cache.h"

#include <vector>

namespace oa::weave {

class GuestCache;

// The first n_local rows are the cache's own, the others are guests'. Of these the first n_new belong to sequences that
// begin here: they need nothing but each other, so their attention is computed here, too.
struct GuestBatch {
    llama_ubatch all;
    uint32_t     n_local, n_new;
};

class GuestContext : public llama_kv_cache_context {
  public:
    // locals: the local rows of those batches that have any, for which `sinfos` has the cells.
    GuestContext(GuestCache * cache, std::vector<GuestBatch> batches, llama_kv_cache::slot_info_vec_t sinfos,
                 std::vector<llama_ubatch> locals);

    bool                 next() override;
    bool                 apply() override;
    const llama_ubatch & get_ubatch() const override { return batches_[at_].all; }

    const llama_ubatch & local() const { return locals_[at_local_]; }
    uint32_t             n_local() const { return batches_[at_].n_local; }
    uint32_t             n_new() const { return batches_[at_].n_new; }
    // Rows whose attention is computed elsewhere.
    uint32_t     n_away() const { return get_ubatch().n_tokens - n_local() - n_new(); }
    GuestCache * cache() const { return cache_; }

  private:
    GuestCache *              cache_;
    std::vector<GuestBatch>   batches_;
    std::vector<llama_ubatch> locals_;
    size_t                    at_ = 0, at_local_ = 0;
};

} // namespace oa::weave
