// ggml-cpu's attention, of rows and in parts.
//
// oa_attend_rows: how many rows a batch has of which a GGML_OP_FLASH_ATTN_EXT node gets some: ggml-cpu's way to compute
// a row depends on it, and a row must not come out otherwise because another one left.
#pragma once

#include "ggml.h"

#define OA_ATTEND_ROWS_PARAM 12 // of op_params; ggml uses the first few

static inline void oa_attend_rows_set(struct ggml_tensor * node, int32_t n_rows) {
    node->op_params[OA_ATTEND_ROWS_PARAM] = n_rows;
}

static inline int64_t oa_attend_rows(const struct ggml_tensor * node, int64_t n_rows) {
    const int64_t given = node->op_params[OA_ATTEND_ROWS_PARAM];
    return given > n_rows ? given : n_rows;
}

#ifdef __cplusplus
struct ggml_compute_params;

// ggml-cpu/ops.cpp: rows ir0 .. ir1 - 1 (heads times rows) over tokens ic_start .. ic_end - 1, or all in tiles; and the
// sum of partial results.
void ggml_compute_forward_flash_attn_ext_f16_one_chunk(const ggml_compute_params * params, ggml_tensor * dst, int ir0,
                                                       int ir1, int64_t ic_start, int64_t ic_end, float * partials,
                                                       int64_t partial_stride);
void ggml_compute_forward_flash_attn_ext_tiled(const ggml_compute_params * params, ggml_tensor * dst, int ir0, int ir1);
void ggml_flash_attn_ext_reduce_partials(const ggml_compute_params * params, ggml_tensor * dst, int64_t n_chunks,
                                         int64_t chunk_size);
#endif
