// Block of block.h as CUDA has it. Only for nvcc.
#pragma once

#include "block.h"

#include <cstdint>
#include <cuda_runtime_api.h>

// Acquire and release between processors came with compute capability 7.0; ggml-cuda may be built for older ones, too.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 700
#define OA_HAS_RELEASE
#endif
// attend_tiles.h needs compute capability 8.0, and CUDA 11.8 for movmatrix.
#if (!defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800) && CUDART_VERSION >= 11080
#define OA_HAS_TILES
#endif

namespace oa::weave::cuda {

template <class Memory, int threads = cuda::n_threads> class CudaBlock {
  public:
    explicit __device__ CudaBlock(Memory & memory) : memory_(memory) {}

    __device__ int  block() const { return int(blockIdx.x); }
    __device__ int  n_blocks() const { return int(gridDim.x); }
    __device__ int  thread() const { return int(threadIdx.x); }
    __device__ int  n_threads() const { return threads; }
    __device__ void sync() const { __syncthreads(); }

    __device__ Memory & shared() const { return memory_; }

    template <int D> static constexpr __host__ __device__ int lanes() { return D / chunk_values; }

    template <int D> static __device__ float sum(float x) {
        static_assert(lanes<D>() <= 32, "lanes share a warp");
#pragma unroll
        for (int distance = lanes<D>() / 2; distance > 0; distance /= 2) {
            x += __shfl_xor_sync(0xffffffffu, x, distance);
        }
        return x;
    }

    // Before compute capability 8.0 a copy is over when the next line begins.
    template <int nbytes> static __device__ void fetch(void * to, const void * from) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
        const uint32_t at = uint32_t(__cvta_generic_to_shared(to));
        if (nbytes == 16) { // past the L1 cache
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" : : "r"(at), "l"(from) : "memory");
        } else {
            asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" : : "r"(at), "l"(from), "n"(nbytes) : "memory");
        }
#else
        struct alignas(nbytes) Bytes {
            char bytes[nbytes];
        };
        *static_cast<Bytes *>(to) = *static_cast<const Bytes *>(from);
#endif
    }

    static __device__ void end_fetch() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
        asm volatile("cp.async.commit_group;" : : : "memory");
#endif
    }

    template <int n> static __device__ void await_fetched() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
        asm volatile("cp.async.wait_group %0;" : : "n"(n) : "memory");
#endif
    }

    static constexpr __device__ bool has_tiles() {
#ifdef OA_HAS_TILES
        return true;
#else
        return false;
#endif
    }

    static __device__ void sync_warp() {
        __syncwarp();
    }

    static __device__ float across(float x, int distance) {
        return __shfl_xor_sync(0xffffffffu, x, distance);
    }

    static __device__ void load_tiles(uint32_t (&r)[4], const char * row) {
#ifdef OA_HAS_TILES
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                     : "r"(uint32_t(__cvta_generic_to_shared(row)))
                     : "memory");
#endif
    }

    static __device__ void load_tiles_turned(uint32_t (&r)[4], const char * row) {
#ifdef OA_HAS_TILES
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                     : "r"(uint32_t(__cvta_generic_to_shared(row)))
                     : "memory");
#endif
    }

    static __device__ uint32_t turn(uint32_t x) {
#ifdef OA_HAS_TILES
        asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %0;" : "+r"(x));
#endif
        return x;
    }

    static __device__ void multiply(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
#ifdef OA_HAS_TILES
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
            "{%0, %1, %2, %3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#endif
    }

    __device__ uint32_t claim(uint32_t * word) const {
        __syncthreads();
        if (threadIdx.x == 0) {
            memory_.claimed = atomicAdd(word, 1u);
        }
        __syncthreads();
        return memory_.claimed;
    }

    __device__ uint32_t arrive(uint32_t * word) const {
        __syncthreads();
        if (threadIdx.x == 0) {
            __threadfence();
            memory_.claimed = atomicAdd(word, 1u);
            __threadfence();
        }
        __syncthreads();
        return memory_.claimed;
    }

    __device__ uint32_t arrive_system(uint32_t * word, uint32_t n) const {
        __syncthreads();
        if (threadIdx.x == 0) {
            __threadfence_system();
            memory_.claimed = atomicAdd(word, n);
            __threadfence_system();
        }
        __syncthreads();
        return memory_.claimed;
    }

    static __device__ uint32_t load_acquire(const uint32_t * word) {
        uint32_t value;
        asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
        return value;
    }

    static __device__ uint64_t load_acquire(const uint64_t * word) {
        uint64_t value;
        asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
        return value;
    }

    static __device__ void store_release(uint32_t * word, uint32_t value) {
        asm volatile("st.release.sys.global.u32 [%0], %1;" : : "l"(word), "r"(value) : "memory");
    }

    static __device__ void store_release(uint64_t * word, uint64_t value) {
        asm volatile("st.release.sys.global.u64 [%0], %1;" : : "l"(word), "l"(value) : "memory");
    }

    // Past the L1 cache: what the host has copied there since is seen.
    static __device__ uint32_t load(const uint32_t * word) {
        uint32_t value;
        asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
        return value;
    }

    static __device__ float exp(float x) {
        return __expf(x);
    }
    static __device__ float tanh(float x) {
        return tanhf(x);
    }

    // Not the clock of an SM, which stops when the GPU turns to another process.
    static __device__ uint64_t now() {
        uint64_t ns;
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns));
        return ns;
    }

    static __device__ void pause() {
        asm volatile("nanosleep.u32 100;");
    }

  private:
    Memory & memory_;
};

} // namespace oa::weave::cuda
