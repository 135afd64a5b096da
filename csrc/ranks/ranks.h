// What a process does besides computing when it is one rank of a tensor-parallel group. csrc/ranks sets the hooks;
// without them nothing happens. Hooks of patch 0008; rank 0 runs the program, the others replay its calls (replay.h).
#pragma once

#include "ggml-backend.h"

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

struct oa_rank_hooks {
    int                  rank;
    int                  n_ranks;
    ggml_backend_dev_t * devices; // RANK0, RANK1, ..., null

    // Rank 0's bytes reach every rank; an eight-byte zero when its program ends. Waits without using the CPU. False
    // when a rank is gone.
    bool (*broadcast)(void * data, size_t nbytes);
    // Whether `ok` on all ranks; `failed` is the first rank on which it is not.
    bool (*all_ok)(bool ok, int * failed);
    // n_rows pieces of `nbytes`, `stride` apart, that rank `owner` has in `data`, reach `data` of rank 0. Does not
    // return when they cannot: nobody could tell half of the logits from all of them.
    void (*gather)(void * data, size_t nbytes, size_t n_rows, size_t stride, int owner);
    // Why the group of ranks cannot go on; empty while it can. Nothing mends it: the process should end.
    const char * (*error)(void);
};

GGML_API void                         oa_ranks_set(const struct oa_rank_hooks * hooks);
GGML_API const struct oa_rank_hooks * oa_ranks(void); // null: this process is no rank

// The simple backend of a meta backend that has the storage: this rank's, else the first.
GGML_API size_t oa_ranks_own(void);

// Where the ranks' part of a tensor ends that has `share` of its `ne` values, in whole pieces: at the nearest one.
// Upstream rounds down, for every layer by another device. But ranks wait for each other in each layer.
GGML_API int64_t oa_ranks_boundary(float share, int64_t ne, int64_t piece);

// After simple backend `owner` has written its part of a split tensor to `data`: other ranks' parts come to rank 0.
GGML_API void oa_ranks_gather(ggml_backend_t backend, void * data, size_t nbytes, size_t n_rows, size_t stride,
                              size_t owner);

#ifdef __cplusplus
}
#endif
