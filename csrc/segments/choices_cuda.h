// Mixtures whose last expert is nothing, on a GPU. Called by ggml-cuda (patch 0026).
#pragma once

#include "skipped_experts.h"

#include <cuda_runtime.h>

// Zeros the result of such an operator: its kernels leave out the rows of nothing. Does nothing for others. A client's
// ids that lie in the result (skipped_experts.h) are zeros then, and so are valid.
void oa_zero_nothing_cuda(struct ggml_tensor * op, cudaStream_t stream);

// In place of ggml_cuda_launch_mm_ids_helper; false: the operator is none of these.
bool oa_group_choices_cuda(const struct ggml_tensor * op, int32_t * ids_src1, int32_t * ids_dst, int32_t * bounds,
                           bool inverse, cudaStream_t stream);
