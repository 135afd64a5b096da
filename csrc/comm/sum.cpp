#include "sum.h"

#include "half.h"
#include "simd.h"

#include <algorithm>

namespace {

// Elements summed at a time: their f32 sums stay in the first-level cache.
constexpr size_t block = 1024;

OA_SIMD void copy_f32(float * to, const float * from, size_t n) {
    for (size_t i = 0; i < n; ++i) {
        to[i] = from[i];
    }
}

OA_SIMD void load_f16(float * to, const uint16_t * from, size_t n) {
    for (size_t i = 0; i < n; ++i) {
        to[i] = oa_f16_f32(from[i]);
    }
}

OA_SIMD void load_bf16(float * to, const uint16_t * from, size_t n) {
    for (size_t i = 0; i < n; ++i) {
        to[i] = oa_bf16_f32(from[i]);
    }
}

OA_SIMD void add_f32(float * to, const float * from, size_t n) {
    for (size_t i = 0; i < n; ++i) {
        to[i] += from[i];
    }
}

OA_SIMD void add_f16(float * to, const uint16_t * from, size_t n) {
    for (size_t i = 0; i < n; ++i) {
        to[i] += oa_f16_f32(from[i]);
    }
}

OA_SIMD void add_bf16(float * to, const uint16_t * from, size_t n) {
    for (size_t i = 0; i < n; ++i) {
        to[i] += oa_bf16_f32(from[i]);
    }
}

OA_SIMD void store_f16(uint16_t * to, const float * from, size_t n) {
    for (size_t i = 0; i < n; ++i) {
        to[i] = oa_f32_f16(from[i]);
    }
}

OA_SIMD void store_bf16(uint16_t * to, const float * from, size_t n) {
    for (size_t i = 0; i < n; ++i) {
        to[i] = oa_f32_bf16(from[i]);
    }
}

// Few sources, of f32, need no sums aside.
OA_SIMD void add_two(float * to, const float * x, const float * y, size_t n) {
    for (size_t i = 0; i < n; ++i) {
        to[i] = x[i] + y[i];
    }
}

OA_SIMD void add_three(float * to, const float * x, const float * y, const float * z, size_t n) {
    for (size_t i = 0; i < n; ++i) {
        to[i] = x[i] + y[i] + z[i];
    }
}

OA_SIMD void add_four(float * to, const float * x, const float * y, const float * z, const float * w, size_t n) {
    for (size_t i = 0; i < n; ++i) {
        to[i] = x[i] + y[i] + z[i] + w[i];
    }
}

template <typename T> using load_function  = void (*)(float *, const T *, size_t);
template <typename T> using store_function = void (*)(T *, const float *, size_t);

template <typename T>
void sum_blocks(void * to, const void * const * sources, int n_sources, size_t n, load_function<T> load,
                load_function<T> add, store_function<T> store) {
    float sums[block];
    for (size_t at = 0; at < n; at += block) {
        const size_t m = std::min(block, n - at);
        load(sums, static_cast<const T *>(sources[0]) + at, m);
        for (int s = 1; s < n_sources; ++s) {
            add(sums, static_cast<const T *>(sources[s]) + at, m);
        }
        store(static_cast<T *>(to) + at, sums, m);
    }
}

float value(oa_dtype dtype, const void * from, size_t i) {
    switch (dtype) {
        case OA_F16: return oa_f16_f32(static_cast<const uint16_t *>(from)[i]);
        case OA_BF16: return oa_bf16_f32(static_cast<const uint16_t *>(from)[i]);
        case OA_F32: break;
    }
    return static_cast<const float *>(from)[i];
}

} // namespace

size_t oa_dtype_size(oa_dtype dtype) {
    return dtype == OA_F32 ? 4 : 2;
}

const char * oa_dtype_name(oa_dtype dtype) {
    switch (dtype) {
        case OA_F16: return "float16";
        case OA_BF16: return "bfloat16";
        case OA_F32: break;
    }
    return "float32";
}

void oa_sum(oa_dtype dtype, void * to, const void * const * sources, int n_sources, size_t n) {
    switch (dtype) {
        case OA_F16: sum_blocks<uint16_t>(to, sources, n_sources, n, load_f16, add_f16, store_f16); return;
        case OA_BF16: sum_blocks<uint16_t>(to, sources, n_sources, n, load_bf16, add_bf16, store_bf16); return;
        case OA_F32: break;
    }
    const auto from = [&](int s) { return static_cast<const float *>(sources[s]); };
    auto *     out  = static_cast<float *>(to);
    switch (n_sources) {
        case 2: add_two(out, from(0), from(1), n); return;
        case 3: add_three(out, from(0), from(1), from(2), n); return;
        case 4: add_four(out, from(0), from(1), from(2), from(3), n); return;
        default: sum_blocks<float>(to, sources, n_sources, n, copy_f32, add_f32, copy_f32);
    }
}

void oa_sum_reference(oa_dtype dtype, void * to, const void * const * sources, int n_sources, size_t n) {
    for (size_t i = 0; i < n; ++i) {
        float sum = value(dtype, sources[0], i);
        for (int s = 1; s < n_sources; ++s) {
            sum += value(dtype, sources[s], i);
        }
        switch (dtype) {
            case OA_F32: static_cast<float *>(to)[i] = sum; break;
            case OA_F16: static_cast<uint16_t *>(to)[i] = oa_f32_f16(sum); break;
            case OA_BF16: static_cast<uint16_t *>(to)[i] = oa_f32_bf16(sum); break;
        }
    }
}
