// Attention on the CPU by our own kernels, in place of ggml-cpu's where an operator is marked. docs/attention.md.
#pragma once

#include "ggml.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define OA_ATTEND_PARAM 13 // of op_params of a GGML_OP_FLASH_ATTN_EXT; ggml uses the first few

// What is there: the rows of a micro-batch share what they read; or each is computed alone from the cells that it sees,
// in their order. Then its bits depend neither on other rows nor on where in the cache its cells lie.
enum { OA_ATTEND_TOGETHER = 1, OA_ATTEND_ALONE = 2 };

#ifdef __cplusplus
extern "C" {
#endif

struct ggml_compute_params;

// Whether the operator is marked, and there is a kernel for it.
bool oa_attend_takes(const struct ggml_tensor * node);
// Bytes of working memory that `oa_attend_compute` needs in params->wdata.
size_t oa_attend_work_bytes(const struct ggml_tensor * node, int n_threads);
// Every thread of the pool calls it. `worked` is called after every block of the cache with the multiply-adds of it.
void oa_attend_compute(const struct ggml_compute_params * params, struct ggml_tensor * node,
                       void (*worked)(int64_t n_multiply_adds));

#ifdef __cplusplus
}

// A number of the kernel that computes rows alone, for caches of these types and heads of these widths; 0: none. Equal
// numbers make equal bits.
uint32_t oa_attend_alone(ggml_type type_k, ggml_type type_v, int64_t d_k, int64_t d_v);
// An operator of one row that sees all of K and V: the heads of one K/V head, on the calling thread, with so much
// working memory.
size_t oa_attend_alone_floats(const ggml_tensor * node);
void   oa_attend_alone_compute(const ggml_tensor * node, int64_t kv_head, float * memory);

// Why there is no kernel for an operator; null where there is one.
const char * oa_attend_refusal(const ggml_tensor * node);
// The kernel that computes it, as "avx512 dots"; and one instruction set for all, for tests: "base", "avx2", "avx512",
// "amx", or "" for the best that this CPU has. Returns false where the CPU lacks it.
const char * oa_attend_kernel(const ggml_tensor * node);
bool         oa_attend_use(const char * instruction_set);
#endif
