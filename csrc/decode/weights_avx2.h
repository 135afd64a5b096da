// Blocks of quantised weights as vectors of 32 bytes, and columns in the same order. AVX2, with AVX-VNNI where the file
// that includes it is compiled for that. Everything is local to that file.
//
// A weight's byte is its value plus an offset, a column's byte its value. A sum of products begins with minus the
// offset times the column's values (`start`). Each lane sums four values.
#pragma once

#include "block_values.h"

#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

constexpr int rows_at_once = 1; // there are half as many registers as with AVX-512

inline __m256i bytes_at(const void * p) {
    return _mm256_loadu_si256(static_cast<const __m256i *>(p));
}

inline __m256i low(__m256i v) {
    return _mm256_and_si256(v, _mm256_set1_epi8(15));
}

inline __m256i high(__m256i v) {
    return low(_mm256_srli_epi16(v, 4));
}

// Of 16 bytes the low halves, then the high ones.
inline __m256i halves_at(const void * p) {
    const __m128i v = _mm_loadu_si128(static_cast<const __m128i *>(p));
    return low(_mm256_set_m128i(_mm_srli_epi16(v, 4), v));
}

// Unsigned bytes of a weight with a column's. Without VNNI they are at most 128: two products do not leave 16 bits.
inline __m256i products(__m256i start, __m256i weight, __m256i column) {
#if defined(__AVXVNNI__)
    return _mm256_dpbusd_avx_epi32(start, weight, column);
#else
    const __m256i pairs = _mm256_maddubs_epi16(weight, column);
    return _mm256_add_epi32(start, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
#endif
}

inline float sum_of(__m256 v) {
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    const __m128 two  = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

inline float largest_of(__m256 v) {
    const __m128 four = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    const __m128 two  = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}

// 32 values as bytes; returns their scale. Rounds as ggml's Q8_0 does, but for the scale, which stays f32.
inline float as_bytes(const float * values, int8_t * to) {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    __m256       v[4], most = _mm256_setzero_ps(), broken = _mm256_setzero_ps();
    for (int i = 0; i < 4; ++i) {
        v[i]   = _mm256_loadu_ps(values + 8 * i);
        most   = _mm256_max_ps(most, _mm256_andnot_ps(sign, v[i]));
        broken = _mm256_or_ps(broken, _mm256_cmp_ps(v[i], v[i], _CMP_UNORD_Q));
    }
    if (_mm256_movemask_ps(broken)) {
        memset(to, 0, 32);
        return NAN; // a broken value shows
    }
    const float  scale   = largest_of(most) / 127.0f;
    const __m256 inverse = _mm256_set1_ps(scale != 0.0f ? 1.0f / scale : 0.0f);
    __m256i      whole[4];
    for (int i = 0; i < 4; ++i) {
        whole[i] = _mm256_cvtps_epi32(_mm256_mul_ps(v[i], inverse));
    }
    const __m256i first = _mm256_packs_epi32(whole[0], whole[1]), second = _mm256_packs_epi32(whole[2], whole[3]);
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7); // packing goes by halves of a register
    const __m256i bytes = _mm256_permutevar8x32_epi32(_mm256_packs_epi16(first, second), order);
    _mm256_storeu_si256(reinterpret_cast<__m256i *>(to), bytes);
    return scale;
}

// In each lane the sum of its four bytes.
inline __m256i sums_of_four(const int8_t * bytes) {
    const __m256i pairs = _mm256_maddubs_epi16(_mm256_set1_epi8(1), bytes_at(bytes));
    return _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
}

inline __m256i start_of(const int8_t * bytes, int offset) {
    return _mm256_mullo_epi32(sums_of_four(bytes), _mm256_set1_epi32(-offset));
}

inline float whole_sum_of(const int8_t * bytes) {
    return sum_of(_mm256_cvtepi32_ps(sums_of_four(bytes)));
}

// A group of a row, with the same groups of columns, `stride` groups apart.
template <class Type, int C>
void add(typename Type::Sum (&sums)[C], const char * row, const typename Type::Column * columns, int64_t stride) {
    Type::add(sums, row, columns, stride);
}

// Blocks of 32 values with one scale.
template <class Block> struct Blocks {
    static constexpr int n = Block::n, values = 32 * n, bytes = Block::bytes * n;

    struct Column {
        __m256i start[n];
        int8_t  whole[n][32];
        float   scales[n];
    };

    struct Sum {
        __m256 lanes = _mm256_setzero_ps();

        float total() const { return sum_of(lanes); }
    };

    static void quantise(const float * x, Column & to) {
        for (int i = 0; i < n; ++i) {
            to.scales[i] = as_bytes(x + 32 * i, to.whole[i]);
            to.start[i]  = start_of(to.whole[i], Block::offset);
        }
    }

    template <int C> static void add(Sum (&sums)[C], const char * row, const Column * columns, int64_t stride) {
#pragma GCC unroll 4
        for (int i = 0; i < n; ++i) {
            const char * const at    = row + i * Block::bytes;
            const __m256i      whole = Block::whole(at);
            const float        scale = Block::scale(at);
#pragma GCC unroll 4
            for (int c = 0; c < C; ++c) {
                const Column & x  = columns[c * stride];
                const __m256   of = _mm256_cvtepi32_ps(Block::products(x.start[i], whole, bytes_at(x.whole[i])));
                sums[c].lanes     = _mm256_fmadd_ps(of, _mm256_set1_ps(scale * x.scales[i]), sums[c].lanes);
            }
        }
    }
};

struct BlockQ4_0 {
    static constexpr int n = 4, bytes = 18, offset = 8;

    static float   scale(const char * p) { return half_at(p); }
    static __m256i whole(const char * p) { return halves_at(p + 2); }
    static __m256i products(__m256i start, __m256i weight, __m256i column) { return ::products(start, weight, column); }
};

struct BlockQ8_0 {
    static constexpr int n = 2, bytes = 34;

    static float scale(const char * p) { return half_at(p); }
#if defined(__AVXVNNI__)
    static constexpr int offset = 128;

    static __m256i whole(const char * p) {
        return _mm256_xor_si256(bytes_at(p + 2), _mm256_set1_epi8(char(0x80)));
    }
    static __m256i products(__m256i start, __m256i weight, __m256i column) {
        return ::products(start, weight, column);
    }
#else
    // Products of two bytes up to 255 leave 16 bits: the weight's signs go to the column.
    static constexpr int offset = 0;

    static __m256i whole(const char * p) {
        return bytes_at(p + 2);
    }
    static __m256i products(__m256i start, __m256i weight, __m256i column) {
        return ::products(start, _mm256_sign_epi8(weight, weight), _mm256_sign_epi8(column, weight));
    }
#endif
};

struct BlockMXFP4 {
    static constexpr int n = 2, bytes = 17, offset = 12;

    static float   scale(const char * p) { return halves_of_powers.of[uint8_t(p[0])]; }
    static __m256i whole(const char * p) {
        // Twice the values of E2M1, plus the offset.
        const __m128i table = _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0);
        return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), halves_at(p + 1));
    }
    static __m256i products(__m256i start, __m256i weight, __m256i column) { return ::products(start, weight, column); }
};

using Q4_0  = Blocks<BlockQ4_0>;
using Q8_0  = Blocks<BlockQ8_0>;
using MXFP4 = Blocks<BlockMXFP4>;

// The value of one lane in all.
template <int lane> __m256 spread(__m256 v) {
    return _mm256_permutevar8x32_ps(v, _mm256_set1_epi32(lane));
}

// A block: eight parts of 32 values.
struct Q4_K {
    static constexpr int values = 256, bytes = 144;

    struct Column {
        __m256 scales, sums; // of parts; sums of all values, times the scale
        int8_t whole[8][32];
    };

    struct Sum {
        __m256 lanes = _mm256_setzero_ps(), minima = _mm256_setzero_ps();

        float total() const { return sum_of(lanes) - sum_of(minima); }
    };

    static void quantise(const float * x, Column & to) {
        alignas(32) float scales[8], sums[8];
        for (int i = 0; i < 8; ++i) {
            scales[i] = as_bytes(x + 32 * i, to.whole[i]);
            sums[i]   = scales[i] * whole_sum_of(to.whole[i]);
        }
        to.scales = _mm256_load_ps(scales);
        to.sums   = _mm256_load_ps(sums);
    }

    // Six bits of each part: all of the first four; low ones of the others, whose two high ones lie in the first.
    static __m256 parts(uint64_t first, uint64_t second, float scale) {
        const uint64_t all = (first & 0x3f3f3f3f) | (second | (first >> 2 & 0x30303030)) << 32;
        const __m256i  v   = _mm256_cvtepu8_epi32(_mm_cvtsi64_si128(int64_t(all)));
        return _mm256_mul_ps(_mm256_cvtepi32_ps(v), _mm256_set1_ps(scale));
    }

    template <int C> static void add(Sum (&sums)[C], const char * row, const Column * columns, int64_t stride) {
        const uint64_t a = value_at<uint32_t>(row + 4), b = value_at<uint32_t>(row + 8);
        const uint64_t c4     = value_at<uint32_t>(row + 12);
        const __m256   scales = parts(a, c4 & 0x0f0f0f0f, half_at(row));
        const __m256   minima = parts(b, c4 >> 4 & 0x0f0f0f0f, half_at(row + 2));
        __m256         both[C];
#pragma GCC unroll 4
        for (int c = 0; c < C; ++c) {
            const Column & x = columns[c * stride];
            both[c]          = _mm256_mul_ps(scales, x.scales);
            sums[c].minima   = _mm256_fmadd_ps(minima, x.sums, sums[c].minima);
        }
        pair<0>(sums, row, columns, stride, both);
        pair<2>(sums, row, columns, stride, both);
        pair<4>(sums, row, columns, stride, both);
        pair<6>(sums, row, columns, stride, both);
    }

    // Parts i and i + 1, which share bytes.
    template <int i, int C>
    static void pair(Sum (&sums)[C], const char * row, const Column * columns, int64_t stride,
                     const __m256 (&both)[C]) {
        const __m256i v = bytes_at(row + 16 + 16 * i), first = low(v), second = high(v), none = _mm256_setzero_si256();
#pragma GCC unroll 4
        for (int c = 0; c < C; ++c) {
            const Column & x = columns[c * stride];
            const __m256   a = _mm256_cvtepi32_ps(products(none, first, bytes_at(x.whole[i])));
            const __m256   b = _mm256_cvtepi32_ps(products(none, second, bytes_at(x.whole[i + 1])));
            sums[c].lanes    = _mm256_fmadd_ps(a, spread<i>(both[c]), sums[c].lanes);
            sums[c].lanes    = _mm256_fmadd_ps(b, spread<i + 1>(both[c]), sums[c].lanes);
        }
    }
};

// A block: eight parts of 32 values, each half with a scale of its own.
struct Q6_K {
    static constexpr int values = 256, bytes = 210;

    struct Column {
        __m256i start[8];
        __m256  scales[2]; // of halves of parts
        int8_t  whole[8][32];
    };

    struct Sum {
        __m256 lanes = _mm256_setzero_ps();

        float total() const { return sum_of(lanes); }
    };

    static void quantise(const float * x, Column & to) {
        alignas(32) float scales[16];
        for (int i = 0; i < 8; ++i) {
            scales[2 * i] = scales[2 * i + 1] = as_bytes(x + 32 * i, to.whole[i]);
            to.start[i]                       = start_of(to.whole[i], 32);
        }
        to.scales[0] = _mm256_load_ps(scales);
        to.scales[1] = _mm256_load_ps(scales + 8);
    }

    template <int C> static void add(Sum (&sums)[C], const char * row, const Column * columns, int64_t stride) {
        half<0>(sums, row, columns, stride);
        half<1>(sums, row, columns, stride);
    }

    // Parts 4 h to 4 h + 3.
    template <int h, int C> static void half(Sum (&sums)[C], const char * row, const Column * columns, int64_t stride) {
        const auto with = [](__m256i four, __m256i two) {
            return _mm256_or_si256(four, _mm256_and_si256(two, _mm256_set1_epi8(0x30)));
        };
        const __m256i a = bytes_at(row + 64 * h), b = bytes_at(row + 64 * h + 32), more = bytes_at(row + 128 + 32 * h);
        const __m256i whole[]   = { with(low(a), _mm256_slli_epi16(more, 4)), with(low(b), _mm256_slli_epi16(more, 2)),
                                    with(high(a), more), with(high(b), _mm256_srli_epi16(more, 2)) };
        const __m128i of_halves = _mm_loadl_epi64(reinterpret_cast<const __m128i *>(row + 192 + 8 * h));
        const __m256  scales =
            _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(of_halves)), _mm256_set1_ps(half_at(row + 208)));
#pragma GCC unroll 4
        for (int c = 0; c < C; ++c) {
            const Column & x    = columns[c * stride];
            const __m256   both = _mm256_mul_ps(scales, x.scales[h]);
#pragma GCC unroll 4
            for (int i = 0; i < 4; ++i) {
                const __m256i places =
                    _mm256_add_epi32(_mm256_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1), _mm256_set1_epi32(2 * i));
                const __m256i found = products(x.start[4 * h + i], whole[i], bytes_at(x.whole[4 * h + i]));
                sums[c].lanes =
                    _mm256_fmadd_ps(_mm256_cvtepi32_ps(found), _mm256_permutevar8x32_ps(both, places), sums[c].lanes);
            }
        }
    }
};

} // namespace
