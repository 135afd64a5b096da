// How K and V of guests are kept in a device's memory: blocks of 64 tokens, of all layers; in a layer's part K, then V;
// in each, head after head with its 64 tokens together, so that a head's tokens are read in one stream.
//
// A format fetches and stores pieces of one token of one head, `d` values: fetch() begins to copy one into shared
// memory, take() reads it there. What widen() gives of it after store() is what widen_new() gives of the same values,
// to the bit: attention of new tokens does not depend on where it finds them.
#pragma once

#include "block.h"

#ifdef __CUDACC__
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#else
#include <cmath>
#endif

namespace oa::weave::cuda {

constexpr uint32_t block_tokens = 64;

// ggml_type.
enum KvType : uint32_t { kv_f32 = 0, kv_f16 = 1, kv_q8_0 = 8, kv_bf16 = 30 };

// Of a token of `width` values; 0: not kept here.
OA_HD constexpr size_t kv_token_nbytes(uint32_t type, size_t width) {
    return type == kv_f32                     ? width * 4 :
           type == kv_f16                     ? width * 2 :
           type == kv_bf16                    ? width * 2 :
           type == kv_q8_0 && width % 32 == 0 ? width + width / 32 * 2 :
                                                0;
}

OA_DEVICE inline float widen_f16(uint16_t x) {
#ifdef __CUDACC__
    return __half2float(__ushort_as_half(x));
#else
    return oa_f16_f32(x);
#endif
}

OA_DEVICE inline uint16_t narrow_f16(float x) {
#ifdef __CUDACC__
    return __half_as_ushort(__float2half_rn(x));
#else
    return oa_f32_f16(x);
#endif
}

struct alignas(16) Raw16 {
    uint16_t values[chunk_values];
};

struct alignas(16) Raw32 {
    float values[chunk_values];
};

// f16 and bf16.
template <class Values> struct Kept16 {
    using Raw                      = Raw16;
    using Staged                   = Raw16;
    static constexpr uint32_t unit = chunk_values; // what store() stores at once

    template <class Block>
    static OA_DEVICE void fetch(Block & b, Staged & to, const char * head, uint32_t token, uint32_t d, uint32_t chunk) {
        b.template fetch<16>(&to, head + (size_t(token) * d + chunk * chunk_values) * 2);
    }

    static OA_DEVICE Raw take(const Staged & from, uint32_t, uint32_t, uint32_t) { return from; }

    static OA_DEVICE void widen(const Raw & raw, float (&to)[chunk_values]) {
        OA_UNROLL
        for (int i = 0; i < chunk_values; ++i) {
            to[i] = Values::widen(raw.values[i]);
        }
    }

    static OA_DEVICE void widen_new(const float * row, uint32_t chunk, float (&to)[chunk_values]) {
        for (int i = 0; i < chunk_values; ++i) {
            to[i] = Values::widen(Values::narrow(row[chunk * chunk_values + uint32_t(i)]));
        }
    }

    static OA_DEVICE void store(char * head, uint32_t token, uint32_t d, uint32_t at, const float * row) {
        Raw raw;
        for (int i = 0; i < chunk_values; ++i) {
            raw.values[i] = Values::narrow(row[at * unit + uint32_t(i)]);
        }
        *reinterpret_cast<Raw *>(head + (size_t(token) * d + at * unit) * 2) = raw;
    }
};

struct F16Values {
    static OA_DEVICE float    widen(uint16_t x) { return widen_f16(x); }
    static OA_DEVICE uint16_t narrow(float x) { return narrow_f16(x); }
};

struct Bf16Values {
    static OA_DEVICE float    widen(uint16_t x) { return oa_bf16_f32(x); }
    static OA_DEVICE uint16_t narrow(float x) { return oa_f32_bf16(x); }
};

using F16  = Kept16<F16Values>;
using Bf16 = Kept16<Bf16Values>;

struct F32 {
    using Raw                      = Raw32;
    using Staged                   = Raw32;
    static constexpr uint32_t unit = chunk_values;

    template <class Block>
    static OA_DEVICE void fetch(Block & b, Staged & to, const char * head, uint32_t token, uint32_t d, uint32_t chunk) {
        const char * from = head + (size_t(token) * d + chunk * chunk_values) * 4;
        b.template fetch<16>(to.values, from);
        b.template fetch<16>(to.values + 4, from + 16);
    }

    static OA_DEVICE Raw take(const Staged & from, uint32_t, uint32_t, uint32_t) { return from; }

    static OA_DEVICE void widen(const Raw & raw, float (&to)[chunk_values]) {
        OA_UNROLL
        for (int i = 0; i < chunk_values; ++i) {
            to[i] = raw.values[i];
        }
    }

    static OA_DEVICE void widen_new(const float * row, uint32_t chunk, float (&to)[chunk_values]) {
        for (int i = 0; i < chunk_values; ++i) {
            to[i] = row[chunk * chunk_values + uint32_t(i)];
        }
    }

    static OA_DEVICE void store(char * head, uint32_t token, uint32_t d, uint32_t at, const float * row) {
        float * to = reinterpret_cast<float *>(head) + size_t(token) * d + at * unit;
        for (uint32_t i = 0; i < unit; ++i) {
            to[i] = row[at * unit + i];
        }
    }
};

// The values of ggml's q8_0; of the 64 tokens of a head first the quants, then the scales, so that both are aligned.
struct Q8_0 {
    struct alignas(8) Raw {
        int8_t   values[chunk_values];
        uint16_t scale;
    };

    static constexpr uint32_t unit = 32;

    struct Scale {
        float    inverse;
        uint16_t kept;
    };

    // A copy into shared memory has 4 bytes at least: two scales, of which one is the piece's.
    struct alignas(16) Staged {
        int8_t   values[chunk_values];
        uint16_t scales[2];
    };

    static OA_DEVICE uint16_t * scales(char * head, uint32_t d) {
        return reinterpret_cast<uint16_t *>(head + size_t(block_tokens) * d);
    }

    static OA_DEVICE uint32_t scale_at(uint32_t token, uint32_t d, uint32_t chunk) {
        return token * (d / unit) + chunk * chunk_values / unit;
    }

    template <class Block>
    static OA_DEVICE void fetch(Block & b, Staged & to, const char * head, uint32_t token, uint32_t d, uint32_t chunk) {
        b.template fetch<8>(to.values, head + size_t(token) * d + chunk * chunk_values);
        b.template fetch<4>(to.scales, scales(const_cast<char *>(head), d) + scale_at(token, d, chunk) / 2 * 2);
    }

    static OA_DEVICE Raw take(const Staged & from, uint32_t token, uint32_t d, uint32_t chunk) {
        Raw raw;
        OA_UNROLL
        for (int i = 0; i < chunk_values; ++i) {
            raw.values[i] = from.values[i];
        }
        raw.scale = from.scales[scale_at(token, d, chunk) % 2];
        return raw;
    }

    static OA_DEVICE void widen(const Raw & raw, float (&to)[chunk_values]) {
        const float scale = widen_f16(raw.scale);
        OA_UNROLL
        for (int i = 0; i < chunk_values; ++i) {
            to[i] = scale * float(raw.values[i]);
        }
    }

    // As quantize_row_q8_0_ref() does.
    static OA_DEVICE Scale scale_of(const float * values) {
        float most = 0.0f;
        for (uint32_t i = 0; i < unit; ++i) {
            most = fmaxf(most, fabsf(values[i]));
        }
        const float scale = most / 127.0f;
        return { scale != 0.0f ? 1.0f / scale : 0.0f, narrow_f16(scale) };
    }

    static OA_DEVICE void widen_new(const float * row, uint32_t chunk, float (&to)[chunk_values]) {
        const Scale scale = scale_of(row + chunk * chunk_values / unit * unit);
        const float kept  = widen_f16(scale.kept);
        for (int i = 0; i < chunk_values; ++i) {
            to[i] = kept * float(int8_t(roundf(row[chunk * chunk_values + uint32_t(i)] * scale.inverse)));
        }
    }

    static OA_DEVICE void store(char * head, uint32_t token, uint32_t d, uint32_t at, const float * row) {
        const Scale scale = scale_of(row + at * unit);
        int8_t *    to    = reinterpret_cast<int8_t *>(head) + size_t(token) * d + at * unit;
        for (uint32_t i = 0; i < unit; ++i) {
            to[i] = int8_t(roundf(row[at * unit + i] * scale.inverse));
        }
        scales(head, d)[token * (d / unit) + at] = scale.kept;
    }
};

} // namespace oa::weave::cuda
