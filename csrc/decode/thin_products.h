// Products of quantised weights with few columns on the CPU by our own kernels, in place of ggml-cpu's where an
// operator is marked as one of ours (own_products.h). docs/decode.md.
#pragma once

#include "ggml.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

struct ggml_compute_params;

// Whether the operator is marked, and there is a kernel for it: with few columns, of a mixture with few tokens.
bool oa_thin_takes(const struct ggml_tensor * node);
// Bytes of working memory that `oa_thin_compute` needs in params->wdata.
size_t oa_thin_work_bytes(const struct ggml_tensor * node);
// Every thread of the pool calls it. `worked` is called after every part with the multiply-adds of it.
void oa_thin_compute(const struct ggml_compute_params * params, struct ggml_tensor * node,
                     void (*worked)(int64_t n_multiply_adds));

#ifdef __cplusplus
}

// Why there is no kernel for an operator; null where there is one.
const char * oa_thin_refusal(const ggml_tensor * node);
// Whether this CPU has kernels for a type of weight.
bool oa_thin_has(ggml_type type);
#endif
