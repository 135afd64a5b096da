// Products of quantised weights with many columns on the CPU by our own kernels, in place of ggml-cpu's where an
// operator is marked. docs/products.md.
#pragma once

#include "ggml.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define OA_PRODUCTS_PARAM 13 // of op_params of a GGML_OP_MUL_MAT(_ID); ggml uses the first few
// Fewer columns, of a mixture fewer for each expert on average, are for other kernels (thin_products.h).
#define OA_FEW_COLUMNS 9

#ifdef __cplusplus
extern "C" {
#endif

struct ggml_compute_params;

// Whether the operator is marked, and there is a kernel for it. It has none for few columns.
bool oa_products_takes(const struct ggml_tensor * node);
// Bytes of working memory that `oa_products_compute` needs in params->wdata.
size_t oa_products_work_bytes(const struct ggml_tensor * node, int n_threads);
// Every thread of the pool calls it. `worked` is called after every part with the multiply-adds of it.
void oa_products_compute(const struct ggml_compute_params * params, struct ggml_tensor * node,
                         void (*worked)(int64_t n_multiply_adds));

#ifdef __cplusplus
}

// Why there is no kernel for an operator; null where there is one.
const char * oa_products_refusal(const ggml_tensor * node);
// Whether there are kernels for a type of weight.
bool oa_products_has(ggml_type type);
// The instruction set that computes; and one for all, for tests: "base", "avx2", "avx-vnni", "avx512", or "" for the
// best that this CPU has. Returns false where the CPU lacks it.
const char * oa_products_kernel(void);
bool         oa_products_use(const char * instruction_set);
#endif
