#include "cuda_block.h"
#include "receive.h"
#include "receive_cuda.h"

namespace oa::weave::cuda {

namespace {

using Memory = Shared<n_threads * chunk_values>;

__global__ void __launch_bounds__(n_threads, 2) poll_kernel(ReceiverState * state) {
#ifdef OA_HAS_RELEASE
    __shared__ Memory memory;
    CudaBlock<Memory> block(memory);
    Poll<CudaBlock<Memory>>(block, *state).run();
#endif
}

struct WatchMemory {
    uint32_t claimed;
};

__global__ void watch_kernel(ReceiverState * state, uint64_t patience, const uint32_t * stop) {
#ifdef OA_HAS_RELEASE
    __shared__ WatchMemory memory;
    using Warp = CudaBlock<WatchMemory, 32>;
    Warp block(memory);
    Poll<Warp>(block, *state).watch(patience, stop);
#endif
}

__global__ void busy_kernel(uint64_t ns) {
    const uint64_t begin = CudaBlock<WatchMemory, 32>::now();
    while (CudaBlock<WatchMemory, 32>::now() - begin < ns) {
    }
}

} // namespace

cudaError_t poll_blocks(int & n_blocks) {
    int         device = 0, generation = 0, n_multiprocessors = 0, per_multiprocessor = 0;
    cudaError_t code = cudaGetDevice(&device);
    if (code == cudaSuccess) {
        code = cudaDeviceGetAttribute(&generation, cudaDevAttrComputeCapabilityMajor, device);
    }
    if (code == cudaSuccess && generation < 7) {
        code = cudaErrorNotSupported;
    }
    if (code == cudaSuccess) {
        code = cudaDeviceGetAttribute(&n_multiprocessors, cudaDevAttrMultiProcessorCount, device);
    }
    if (code == cudaSuccess) {
        code = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_multiprocessor, poll_kernel, n_threads, 0);
    }
    if (code == cudaSuccess) { // loads it, as the line above loads poll_kernel: not amidst a sender's wait
        cudaFuncAttributes about;
        code = cudaFuncGetAttributes(&about, watch_kernel);
    }
    n_blocks = n_multiprocessors * per_multiprocessor;
    return code;
}

cudaError_t launch_poll(ReceiverState * state, int n_blocks, cudaStream_t stream) {
    poll_kernel<<<n_blocks, n_threads, 0, stream>>>(state);
    return cudaGetLastError();
}

cudaError_t launch_watch(ReceiverState * state, uint64_t patience, const uint32_t * stop, cudaStream_t stream) {
    watch_kernel<<<1, 32, 0, stream>>>(state, patience, stop);
    return cudaGetLastError();
}

cudaError_t launch_busy(uint64_t ns, cudaStream_t stream) {
    busy_kernel<<<1, 1, 0, stream>>>(ns);
    return cudaGetLastError();
}

} // namespace oa::weave::cuda
