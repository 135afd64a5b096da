// One product of a quantised matrix with columns of activations as our kernels see it. Plain data: files compiled for
// other instruction sets share it.
#pragma once

#include <cstddef>
#include <cstdint>

#define OA_INLINE __attribute__((always_inline)) inline

namespace oa::products {

enum class WeightType : int { q4_0, q8_0, mxfp4, q4_k, q6_k };

constexpr int n_weight_types = 5;

// Columns are quantised in blocks of as many values, each with a scale of its own.
constexpr int64_t block_values = 32;

// A column of a mixture: the token, and which of the experts that it chose computes it.
struct Choice {
    int32_t slot, token;
};

// out[c][r] = sum over k of weight[r][k] * columns[c][k].
struct Task {
    const char *   weight; // rows of ggml's blocks
    size_t         row_stride;
    WeightType     type;
    int64_t        n_rows, n_k, n_columns;
    const char *   columns; // f32; [outer][n_middle][n_inner]
    size_t         inner_stride, middle_stride, outer_stride;
    int64_t        n_inner, n_middle;
    char *         out; // f32
    size_t         out_stride;
    const Choice * choices; // of an expert: its columns, [tokens][n_inner]; null: all
    int64_t        n_slots; // of a token of a mixture

    // Inline everywhere: the linker must not take a copy that was compiled for a later CPU.
    OA_INLINE const float * column(int64_t c) const {
        const int64_t inner  = choices ? choices[c].slot % n_inner : c % n_inner;
        const int64_t middle = choices ? choices[c].token : c / n_inner;
        return reinterpret_cast<const float *>(columns + size_t(inner) * inner_stride +
                                               size_t(middle % n_middle) * middle_stride +
                                               size_t(middle / n_middle) * outer_stride);
    }

    OA_INLINE char * out_of(int64_t c) const {
        return out + size_t(choices ? choices[c].token * n_slots + choices[c].slot : c) * out_stride;
    }
};

struct Kernels {
    const char * name;
    int64_t      panel_rows, tile_columns; // computed at once
    // Bytes of all columns, quantised; and of a thread's working memory for that many columns.
    size_t (*columns_bytes)(const Task & task);
    size_t (*scratch_bytes)(int64_t n_columns);
    // Quantises `n_blocks` blocks of values of the columns of a tile.
    void (*quantise)(const Task & task, int64_t tile, int64_t first_block, int64_t n_blocks, char * quantised);
    // The products of one panel of rows with the columns of some tiles.
    void (*run)(const Task & task, int64_t panel, int64_t first_tile, int64_t n_tiles, const char * quantised,
                char * scratch);
};

extern const Kernels base_kernels, avx2_kernels, avx_vnni_kernels, avx512_kernels;

} // namespace oa::products
