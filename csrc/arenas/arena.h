// Arenas: what one compute buffer holds while one graph runs, as the graph allocator (ggml-alloc.c) sees it. Recorded
// on request, and laid out again for models whose backend map says `arenas offline`. Hooks: patch 0014.
//
// Invariant: which tensors share a block, and when blocks begin and end, does not depend on where they lie. So a second
// pass over the same graph asks for the same blocks in the same order, and can be given other places.
#pragma once

#include "ggml-backend.h"
#include "ggml.h"

#ifdef __cplusplus
extern "C" {
#endif

// Around the passes over one graph: the first begins; it has ended, and whether another one is to follow, in which
// blocks get their places from here; all have ended.
GGML_API void oa_arenas_begin(const struct ggml_cgraph * graph);
GGML_API bool oa_arenas_again(const ggml_backend_buffer_type_t * bufts, const void * const * allocators, int n);
GGML_API void oa_arenas_end(void);

// During a pass: the place of the next block, false if the allocator chooses; it chose; it frees a block or the end of
// one, true if there is nothing to be freed.
GGML_API bool oa_arenas_place(const void * allocator, size_t nbytes, size_t * offset);
GGML_API void oa_arenas_add(const void * allocator, int chunk, size_t offset, size_t nbytes);
GGML_API bool oa_arenas_remove(const void * allocator, int chunk, size_t offset, size_t nbytes);

#ifdef __cplusplus
}

#include "offline_offsets.h"

#include <vector>

struct oa_arena {
    ggml_backend_buffer_type_t buft;
    size_t                     online;  // bytes that the allocator's best fit takes
    size_t                     offline; // bytes that oa_offline_offsets takes
    size_t                     bound;   // most bytes that are alive at once
    std::vector<oa_block>      blocks;
};

// Records the arenas of the graphs that this thread allocates from now on, until they are taken.
GGML_API void oa_arenas_record();
GGML_API std::vector<oa_arena> oa_arenas_take();
#endif
