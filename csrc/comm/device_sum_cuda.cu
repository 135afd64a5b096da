#include "device_sum_cuda.h"

namespace {

// Flags are in memory of another GPU or of this one: PTX's acquire and release in system scope.
class cuda_block {
  public:
    __device__ int  block() const { return int(blockIdx.x); }
    __device__ int  n_blocks() const { return int(gridDim.x); }
    __device__ int  thread() const { return int(threadIdx.x); }
    __device__ int  n_threads() const { return int(blockDim.x); }
    __device__ void sync() const { __syncthreads(); }
    __device__ bool all(bool mine) const { return __syncthreads_and(mine); }

    static __device__ uint64_t load_acquire(const uint64_t * word) {
        uint64_t value;
        asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
        return value;
    }

    static __device__ void store_release(uint64_t * word, uint64_t value) {
        asm volatile("st.release.sys.global.u64 [%0], %1;" : : "l"(word), "l"(value) : "memory");
    }

    static __device__ uint32_t load_host(const uint32_t * word) {
        uint32_t value;
        asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
        return value;
    }

    static __device__ void store_host(uint32_t * word, uint32_t value) {
        asm volatile("st.relaxed.sys.global.u32 [%0], %1;" : : "l"(word), "r"(value) : "memory");
    }

    // Not the clock of an SM, which stops when the GPU turns to another process.
    static __device__ uint64_t now() {
        uint64_t ns;
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns));
        return ns;
    }

    static __device__ void pause() { __nanosleep(50); }
};

template <typename Values>
__global__ void __launch_bounds__(OA_DEVICE_THREADS) run_step(const __grid_constant__ oa_device_call call) {
    cuda_block block;
    oa_device_block<Values, cuda_block>(block, call).run();
}

} // namespace

cudaError_t oa_device_sum_cuda(const oa_device_call & call, cudaStream_t stream) {
    const int n_blocks = oa_device_blocks(call);
    switch (call.dtype) {
        case OA_F32: run_step<oa_f32_values><<<n_blocks, OA_DEVICE_THREADS, 0, stream>>>(call); break;
        case OA_F16: run_step<oa_f16_values><<<n_blocks, OA_DEVICE_THREADS, 0, stream>>>(call); break;
        case OA_BF16: run_step<oa_bf16_values><<<n_blocks, OA_DEVICE_THREADS, 0, stream>>>(call); break;
    }
    return cudaGetLastError();
}
