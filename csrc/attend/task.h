// One attention operator as our kernels see it. Plain data: files compiled for other instruction sets share it.
#pragma once

#include <cstddef>
#include <cstdint>

#define OA_INLINE __attribute__((always_inline)) inline

namespace oa::attend {

constexpr int64_t block_tokens = 64; // of the cache, looked at at once

enum class CacheType : int { f32, f16, bf16, q8_0, q4_0 };

constexpr int n_cache_types = 5;

constexpr int64_t block_values = 32; // of a cache of bytes; they share a scale

// How products are computed: dots.h, words.h, columns.h, tiles.h.
enum class Method : int { dots, words, columns, tiles };

// Whether a row's scores lie one behind the other, and all heads of a block may be computed together.
OA_INLINE constexpr bool is_by_rows(Method method) {
    return method == Method::dots || method == Method::words;
}

// Distances in bytes between neighbours along each axis.
struct Strides {
    size_t row, head, sequence;
};

// Queries of one K/V head come row by row (token by token), all heads of the group beside each other: row r is token
// r / group, head r % group of the group.
struct Task {
    const char *  q; // f32
    const char *  k;
    const char *  v;
    const char *  mask;  // f16, or null
    const float * sinks; // of heads, or null
    char *        out;   // f32
    Strides       q_strides, k_strides, v_strides, mask_strides, out_strides;
    CacheType     k_type, v_type;
    int64_t       d_k, d_v, n_tokens, n_head, n_head_kv, n_sequences, n_kv; // n_tokens: of queries, n_kv: of the cache
    int64_t       mask_sequences, kv_sequences;
    size_t        k_bytes, v_bytes; // of a head
    float         scale, max_bias, softcap;

    // A single row that sees all `n_kv` cells; which of the cache they are, or null: all, one behind the other.
    bool            alone;
    const int32_t * cells;

    // How it is cut, by the shape alone: results do not depend on the number of threads.
    Method  method;
    int64_t n_groups, heads_per_group; // of K/V heads, computed together
    int64_t n_tiles, rows_per_tile;    // of a K/V head's queries
    int64_t n_splits, split_tokens;    // of the cache

    // Inline everywhere: the linker must not take a copy that was compiled for a later CPU.
    OA_INLINE int64_t group() const { return n_head / n_head_kv; }
    OA_INLINE int64_t rows() const { return n_tokens * group(); }
    OA_INLINE int64_t n_items() const { return n_sequences * n_groups * n_tiles * n_splits; }
    OA_INLINE int64_t partial_floats() const { return 2 + d_v; }
};

// Called after every block with the multiply-adds that it took.
using Worked = void (*)(int64_t n_multiply_adds);

struct Kernels {
    const char * name;
    bool         words;     // whether there are those of words.h
    Method       many;      // the method for many query rows of a K/V head
    int64_t      many_rows; // from how many on; dots or words below
    int64_t      tile_rows; // of queries that are computed together by it at most
    // Working memory of a thread, in floats.
    size_t (*scratch_floats)(const Task & task);
    // Computes one item: writes its rows, or with several splits (maximum, sum, values) per row to `partials`.
    void (*run)(const Task & task, int64_t item, float * scratch, float * partials, Worked worked);
};

extern const Kernels base_kernels, avx2_kernels, avx512_kernels, amx_kernels;

} // namespace oa::attend
