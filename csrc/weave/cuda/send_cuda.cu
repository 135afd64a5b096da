#include "cuda_block.h"
#include "send.h"
#include "send_cuda.h"

#ifdef OA_HAS_RELEASE
#define OA_CALL const __grid_constant__
#else
#define OA_CALL const
#endif

namespace oa::weave::cuda {

namespace {

using Block = CudaBlock<SendShared>;

enum class Step { attach, await_accepted, ping, await_ping, check_ping };

__global__ void attach_kernel(SenderState * state, Step step) {
#ifdef OA_HAS_RELEASE
    __shared__ SendShared memory;
    Block                 block(memory);
    Send<Block>           send(block, *state);
    switch (step) {
        case Step::attach: return send.attach();
        case Step::await_accepted: return send.await_accepted();
        case Step::ping: return send.ping();
        case Step::await_ping: return send.await_result(send.ping_answer());
        case Step::check_ping: return send.check_ping();
    }
#endif
}

__global__ void __launch_bounds__(n_threads) send_kernel(SenderState * state, OA_CALL SendCall call) {
#ifdef OA_HAS_RELEASE
    __shared__ SendShared memory;
    Block                 block(memory);
    Send<Block>(block, *state).send(call);
#endif
}

__global__ void await_kernel(SenderState * state, uint32_t nbytes) {
#ifdef OA_HAS_RELEASE
    using Warp = CudaBlock<SendShared, 32>;
    __shared__ SendShared memory;
    Warp                  block(memory);
    Send<Warp>(block, *state).await_result(nbytes);
#endif
}

__global__ void __launch_bounds__(n_threads) fetch_kernel(SenderState * state, OA_CALL FetchCall call) {
#ifdef OA_HAS_RELEASE
    __shared__ SendShared memory;
    Block                 block(memory);
    Send<Block>(block, *state).fetch(call);
#endif
}

// Every thread has four packs of 16 bytes, if there are enough; 32 blocks fill a link, it is thought (not measured).
int blocks_for(size_t n_floats) {
    const size_t blocks = n_floats / (size_t(n_threads) * 4 * 4) + 1;
    return int(blocks < 32 ? blocks : 32);
}

} // namespace

cudaError_t launch_attach(SenderState * state, cudaStream_t stream) {
    // Loaded now: CUDA loads a kernel at its first launch, which may wait for what runs, as an await for its answer.
    cudaFuncAttributes about;
    for (const void * kernel :
         { reinterpret_cast<const void *>(attach_kernel), reinterpret_cast<const void *>(send_kernel),
           reinterpret_cast<const void *>(await_kernel), reinterpret_cast<const void *>(fetch_kernel) }) {
        const cudaError_t code = cudaFuncGetAttributes(&about, kernel);
        if (code != cudaSuccess) {
            return code;
        }
        if (about.ptxVersion < 70) {
            return cudaErrorNotSupported;
        }
    }
    for (const Step step : { Step::attach, Step::await_accepted, Step::ping, Step::await_ping, Step::check_ping }) {
        attach_kernel<<<1, n_threads, 0, stream>>>(state, step);
    }
    return cudaGetLastError();
}

cudaError_t launch_send(SenderState * state, const SendCall & call, cudaStream_t stream) {
    const AttendTask & t = call.task;
    const size_t       n = size_t(t.n_rows) * (size_t(t.n_head + t.n_head_kv) * t.d_k + size_t(t.n_head_kv) * t.d_v);
    send_kernel<<<blocks_for(n), n_threads, 0, stream>>>(state, call);
    return cudaGetLastError();
}

cudaError_t launch_fetch(SenderState * state, const FetchCall & call, cudaStream_t stream) {
    await_kernel<<<1, 32, 0, stream>>>(state, call.n_floats * uint32_t(sizeof(float)));
    fetch_kernel<<<blocks_for(call.n_floats), n_threads, 0, stream>>>(state, call);
    return cudaGetLastError();
}

} // namespace oa::weave::cuda
