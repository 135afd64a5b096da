#include "conditional_cuda.h"
#include "cuda_block.h"
#include "receive.h"
#include "receive_cuda.h"

namespace oa::weave::cuda {

namespace {

using Memory = Shared<n_threads * chunk_values>;

__global__ void __launch_bounds__(n_threads, 2) work_kernel(ReceiverState * state) {
#ifdef OA_HAS_RELEASE
    __shared__ Memory memory;
    CudaBlock<Memory> block(memory);
    Work<CudaBlock<Memory>>(block, *state).run();
#endif
}

struct LookMemory {
    uint32_t claimed, status;
};

constexpr int look_threads = 32;
using Warp                 = CudaBlock<LookMemory, look_threads>;

__device__ bool look(ReceiverState & state) {
#ifdef OA_HAS_RELEASE
    __shared__ LookMemory memory;
    Warp                  block(memory);
    return Look<Warp, AllPollRules>(block, state).look();
#else
    return false;
#endif
}

__global__ void look_kernel(ReceiverState * state) {
    look(*state);
}

#if CUDART_VERSION >= 12040
__global__ void deciding_look_kernel(ReceiverState * state, Condition condition) {
    const bool found = look(*state);
    if (threadIdx.x == 0) {
        cudaGraphSetConditional(condition, found ? 1 : 0);
    }
}
#endif

__global__ void watch_kernel(ReceiverState * state, uint64_t patience, const uint32_t * stop) {
#ifdef OA_HAS_RELEASE
    __shared__ LookMemory memory;
    Warp                  block(memory);
    Look<Warp, AllPollRules>(block, *state).watch(patience, stop);
#endif
}

__global__ void busy_kernel(uint64_t ns) {
    const uint64_t begin = Warp::now();
    while (Warp::now() - begin < ns) {
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
        code = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_multiprocessor, work_kernel, n_threads, 0);
    }
    // Loads them, as the line above loads work_kernel: not amidst a sender's wait.
    cudaFuncAttributes about;
    if (code == cudaSuccess) {
        code = cudaFuncGetAttributes(&about, watch_kernel);
    }
    if (code == cudaSuccess) {
        code = cudaFuncGetAttributes(&about, look_kernel);
    }
    n_blocks = n_multiprocessors * per_multiprocessor;
    return code;
}

bool conditional_works([[maybe_unused]] const char *& why_not) {
#if CUDART_VERSION >= 12040
    int         driver = 0;
    cudaError_t code   = cudaDriverGetVersion(&driver);
    if (code == cudaSuccess && driver < 12040) {
        why_not = "the driver is older than CUDA 12.4";
        return false;
    }
    cudaFuncAttributes about;
    if (code == cudaSuccess) {
        code = cudaFuncGetAttributes(&about, deciding_look_kernel);
    }
    if (code == cudaSuccess) {
        code = try_conditional();
    }
    why_not = cudaGetErrorString(code);
    return code == cudaSuccess;
#else
    why_not = "built with CUDA before 12.4";
    return false;
#endif
}

namespace {

#if CUDART_VERSION >= 12040
cudaError_t capture_poll(ReceiverState * state, int n_blocks, cudaStream_t stream) {
    Conditional work;
    cudaError_t code = work.open(stream);
    if (code == cudaSuccess) {
        deciding_look_kernel<<<1, look_threads, 0, stream>>>(state, work.condition());
        code = cudaGetLastError();
    }
    void *               arguments[] = { &state };
    cudaKernelNodeParams body        = {};
    body.func                        = reinterpret_cast<void *>(work_kernel);
    body.gridDim                     = dim3(unsigned(n_blocks));
    body.blockDim                    = dim3(n_threads);
    body.kernelParams                = arguments;
    return code == cudaSuccess ? work.then(body) : code;
}
#endif

} // namespace

cudaError_t launch_poll(ReceiverState * state, int n_blocks, [[maybe_unused]] bool conditional, cudaStream_t stream) {
    cudaError_t code = cudaSuccess;
#if CUDART_VERSION >= 12040
    cudaStreamCaptureStatus captured = cudaStreamCaptureStatusNone;
    if (conditional) {
        code = cudaStreamIsCapturing(stream, &captured);
    }
    if (captured == cudaStreamCaptureStatusActive) {
        return capture_poll(state, n_blocks, stream);
    }
#endif
    if (code == cudaSuccess) {
        look_kernel<<<1, look_threads, 0, stream>>>(state);
        code = cudaGetLastError();
    }
    if (code == cudaSuccess) {
        work_kernel<<<n_blocks, n_threads, 0, stream>>>(state);
        code = cudaGetLastError();
    }
    return code;
}

cudaError_t launch_watch(ReceiverState * state, uint64_t patience, const uint32_t * stop, cudaStream_t stream) {
    watch_kernel<<<1, look_threads, 0, stream>>>(state, patience, stop);
    return cudaGetLastError();
}

cudaError_t launch_busy(uint64_t ns, cudaStream_t stream) {
    busy_kernel<<<1, 1, 0, stream>>>(ns);
    return cudaGetLastError();
}

} // namespace oa::weave::cuda
