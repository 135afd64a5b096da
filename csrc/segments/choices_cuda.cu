#include "choices_cuda.h"
#include "group_choices.h"

namespace {

struct cuda_warp {
    template <typename F> __device__ uint32_t ballot(const F & holds) const {
        return __ballot_sync(0xffffffffu, holds(int(threadIdx.x)));
    }
    template <typename F> __device__ void each(uint32_t mask, const F & call) const {
        if (mask >> threadIdx.x & 1) {
            call(int(threadIdx.x));
        }
    }
    __device__ int count(uint32_t mask) const { return __popc(mask); }
};

__global__ void __launch_bounds__(32) group(const __grid_constant__ oa_choice_groups groups) {
    oa_group_choices_of(cuda_warp(), groups, int(blockIdx.x));
}

} // namespace

void oa_zero_nothing_cuda(ggml_tensor * op, cudaStream_t stream) {
    if (oa_has_nothing(op)) {
        GGML_ASSERT(ggml_is_contiguous(op));
        const cudaError_t code = cudaMemsetAsync(op->data, 0, ggml_nbytes(op), stream);
        GGML_ASSERT(code == cudaSuccess);
    }
}

bool oa_group_choices_cuda(const ggml_tensor * op, int32_t * ids_src1, int32_t * ids_dst, int32_t * bounds,
                           bool inverse, cudaStream_t stream) {
    if (!oa_has_nothing(op)) {
        return false;
    }
    const ggml_tensor *experts = op->src[0], *rows = op->src[1], *ids = op->src[2];
    oa_choice_groups   groups;
    groups.ids          = static_cast<const int32_t *>(ids->data);
    groups.ids_src1     = ids_src1;
    groups.ids_dst      = ids_dst;
    groups.bounds       = bounds;
    groups.n_experts    = int(experts->ne[2]);
    groups.n_tokens     = int(ids->ne[1]);
    groups.n_used       = int(ids->ne[0]);
    groups.n_rows       = int(rows->ne[1]);
    groups.ids_stride   = int(ids->nb[1] / sizeof(int32_t));
    groups.token_stride = int(rows->nb[2] / rows->nb[1]);
    groups.inverse      = inverse;
    group<<<groups.n_experts, 32, 0, stream>>>(groups);
    return true;
}
