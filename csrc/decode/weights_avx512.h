// Blocks of quantised weights as vectors of bytes for VNNI, and columns in the same order. AVX-512 only. Everything is
// local to the file that includes it.
//
// A weight's byte is its value plus an offset. A sum of products begins with minus the offset times the column's
// values (`starts`). Each lane sums four values; scales lie beside lanes.
#pragma once

#include "block_values.h"

#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

inline __m512i bytes_at(const void * p) {
    return _mm512_loadu_si512(p);
}

inline __m128i part_at(const void * p) {
    return _mm_loadu_si128(static_cast<const __m128i *>(p));
}

inline __m512i low(__m512i v) {
    return _mm512_and_si512(v, _mm512_set1_epi8(15));
}

inline __m512i high(__m512i v) {
    return low(_mm512_srli_epi16(v, 4));
}

inline __m512 products(__m512i start, __m512i weight, __m512i column) {
    return _mm512_cvtepi32_ps(_mm512_dpbusd_epi32(start, weight, column));
}

// 32 values as bytes; returns their scale. Rounds as ggml's Q8_0 does, but for the scale, which stays f32.
inline float as_bytes(const float * values, int8_t * to) {
    const __m512 a = _mm512_loadu_ps(values), b = _mm512_loadu_ps(values + 16);
    if (_mm512_cmp_ps_mask(a, b, _CMP_UNORD_Q)) {
        memset(to, 0, 32);
        return NAN; // a broken value shows
    }
    const float  most    = _mm512_reduce_max_ps(_mm512_max_ps(_mm512_abs_ps(a), _mm512_abs_ps(b)));
    const float  scale   = most / 127.0f;
    const __m512 inverse = _mm512_set1_ps(scale != 0.0f ? 1.0f / scale : 0.0f);
    const auto   put     = [&](__m512 v, int8_t * at) {
        const __m512i whole = _mm512_cvtps_epi32(_mm512_mul_ps(v, inverse));
        _mm_storeu_si128(reinterpret_cast<__m128i *>(at), _mm512_cvtsepi32_epi8(whole));
    };
    put(a, to);
    put(b, to + 16);
    return scale;
}

// In each lane minus `offset` times the sum of its four bytes.
inline __m512i start_of(const int8_t * bytes, int offset) {
    const __m512i sums = _mm512_dpbusd_epi32(_mm512_setzero_si512(), _mm512_set1_epi8(1), bytes_at(bytes));
    return _mm512_mullo_epi32(sums, _mm512_set1_epi32(-offset));
}

constexpr int rows_at_once = 2;

// A group of a row, with the same groups of columns, `stride` groups apart.
template <class Type, int C>
void add(typename Type::Sum (&sums)[C], const char * row, const typename Type::Column * columns, int64_t stride) {
    const typename Type::Weight weight(row);
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) {
        sums[c].add(weight, columns[c * stride]);
    }
}

// A column's group that is one vector.
struct ColumnOfBytes {
    int8_t  whole[64];
    __m512i start;
    __m512  scale;
};

// Its products with a weight that has `whole` and `scale`, too.
template <class Weight> struct SumOfBytes {
    __m512 lanes = _mm512_setzero_ps();

    void add(const Weight & w, const ColumnOfBytes & x) {
        const __m512 scale = _mm512_mul_ps(w.scale, x.scale);
        lanes              = _mm512_fmadd_ps(products(x.start, w.whole, bytes_at(x.whole)), scale, lanes);
    }

    float total() const { return _mm512_reduce_add_ps(lanes); }
};

// Four blocks: the first halves of all, then the second halves.
struct Q4_0 {
    static constexpr int values = 128, bytes = 72;

    struct Column {
        int8_t  low[64], high[64];
        __m512i start;
        __m512  scale;
    };

    struct Weight {
        __m512i low, high;
        __m512  scale;

        explicit Weight(const char * p) {
            const __m512i places = _mm512_set_epi16(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 27, 27, 27, 27, 18,
                                                    18, 18, 18, 9, 9, 9, 9, 0, 0, 0, 0);
            scale     = _mm512_cvtph_ps(_mm512_castsi512_si256(_mm512_permutexvar_epi16(places, bytes_at(p))));
            __m512i v = _mm512_castsi128_si512(part_at(p + 2));
            v         = _mm512_inserti32x4(v, part_at(p + 20), 1);
            v         = _mm512_inserti32x4(v, part_at(p + 38), 2);
            v         = _mm512_inserti32x4(v, part_at(p + 56), 3);
            low       = ::low(v);
            high      = ::high(v);
        }
    };

    static void quantise(const float * x, Column & to) {
        alignas(64) float scales[16];
        for (int block = 0; block < 4; ++block) {
            int8_t      whole[32];
            const float scale = as_bytes(x + 32 * block, whole);
            memcpy(to.low + 16 * block, whole, 16);
            memcpy(to.high + 16 * block, whole + 16, 16);
            std::fill(scales + 4 * block, scales + 4 * block + 4, scale);
        }
        to.start = _mm512_add_epi32(start_of(to.low, 8), start_of(to.high, 8));
        to.scale = _mm512_load_ps(scales);
    }

    struct Sum {
        __m512 lanes = _mm512_setzero_ps();

        void add(const Weight & w, const Column & x) {
            const __m512i first = _mm512_dpbusd_epi32(x.start, w.low, bytes_at(x.low));
            lanes = _mm512_fmadd_ps(products(first, w.high, bytes_at(x.high)), _mm512_mul_ps(w.scale, x.scale), lanes);
        }

        float total() const { return _mm512_reduce_add_ps(lanes); }
    };
};

// Two blocks.
struct Q8_0 {
    static constexpr int values = 64, bytes = 68;

    using Column = ColumnOfBytes;

    struct Weight {
        __m512i whole;
        __m512  scale;

        explicit Weight(const char * p) {
            const __m512i places = _mm512_set_epi16(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 17, 17, 17, 17, 17,
                                                    17, 17, 17, 0, 0, 0, 0, 0, 0, 0, 0);
            scale         = _mm512_cvtph_ps(_mm512_castsi512_si256(_mm512_permutexvar_epi16(places, bytes_at(p))));
            const auto at = [](const char * from) {
                return _mm256_loadu_si256(reinterpret_cast<const __m256i *>(from));
            };
            const __m512i v = _mm512_inserti64x4(_mm512_castsi256_si512(at(p + 2)), at(p + 36), 1);
            whole           = _mm512_xor_si512(v, _mm512_set1_epi8(char(0x80)));
        }
    };

    static void quantise(const float * x, Column & to) {
        const float first = as_bytes(x, to.whole), second = as_bytes(x + 32, to.whole + 32);
        to.start = start_of(to.whole, 128);
        to.scale = _mm512_insertf32x8(_mm512_set1_ps(first), _mm256_set1_ps(second), 1);
    }

    using Sum = SumOfBytes<Weight>;
};

// Two blocks: the first halves of both, then the second halves.
struct MXFP4 {
    static constexpr int values = 64, bytes = 34;

    using Column = ColumnOfBytes;

    struct Weight {
        __m512i whole;
        __m512  scale;

        explicit Weight(const char * p) {
            // Twice the values of E2M1, plus the offset.
            const __m512i table =
                _mm512_broadcast_i32x4(_mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0));
            const __m512i v  = _mm512_inserti32x4(_mm512_castsi128_si512(part_at(p + 1)), part_at(p + 18), 1);
            const __m512i of = _mm512_inserti64x4(low(v), _mm512_castsi512_si256(high(v)), 1);
            whole            = _mm512_shuffle_epi8(table, of);
            scale            = in_lanes(halves_of_powers.of[uint8_t(p[0])], halves_of_powers.of[uint8_t(p[17])]);
        }
    };

    static void quantise(const float * x, Column & to) {
        float scales[2];
        for (int block = 0; block < 2; ++block) {
            int8_t whole[32];
            scales[block] = as_bytes(x + 32 * block, whole);
            memcpy(to.whole + 16 * block, whole, 16);
            memcpy(to.whole + 32 + 16 * block, whole + 16, 16);
        }
        to.start = start_of(to.whole, 12);
        to.scale = in_lanes(scales[0], scales[1]);
    }

    using Sum = SumOfBytes<Weight>;

    // Beside the values of each block.
    static __m512 in_lanes(float first, float second) {
        return _mm512_mask_broadcastss_ps(_mm512_set1_ps(first), 0xf0f0, _mm_set_ss(second));
    }
};

// A block: of 128 values parts 0 and 2, then 1 and 3 of 32.
struct Q4_K {
    static constexpr int values = 256, bytes = 144;

    struct Column {
        int8_t whole[4][64];
        __m256 scales, sums; // of parts; sums of all values, times the scale
    };

    struct Weight {
        __m512i whole[4];
        __m256  scales, minima;

        explicit Weight(const char * p) {
            for (int i = 0; i < 2; ++i) {
                const __m512i v  = bytes_at(p + 16 + 64 * i);
                whole[2 * i]     = low(v);
                whole[2 * i + 1] = high(v);
            }
            const uint64_t a = value_at<uint32_t>(p + 4), b = value_at<uint32_t>(p + 8), c = value_at<uint32_t>(p + 12);
            scales = parts(a, c & 0x0f0f0f0f, half_at(p));
            minima = parts(b, c >> 4 & 0x0f0f0f0f, half_at(p + 2));
        }

        // Six bits of each part: all of the first four; low ones of the others, whose two high ones lie in the first.
        static __m256 parts(uint64_t first, uint64_t second, float scale) {
            const uint64_t all = (first & 0x3f3f3f3f) | (second | (first >> 2 & 0x30303030)) << 32;
            const __m256i  v   = _mm256_cvtepu8_epi32(_mm_cvtsi64_si128(int64_t(all)));
            return _mm256_mul_ps(_mm256_cvtepi32_ps(v), _mm256_set1_ps(scale));
        }
    };

    static void quantise(const float * x, Column & to) {
        alignas(32) float scales[8], sums[8];
        for (int part = 0; part < 8; ++part) {
            int8_t * const whole = to.whole[part / 4 * 2 + part % 2] + part / 2 % 2 * 32;
            scales[part]         = as_bytes(x + 32 * part, whole);
            const __m256i v      = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(whole));
            const __m256i four   = _mm256_dpbusd_epi32(_mm256_setzero_si256(), _mm256_set1_epi8(1), v);
            sums[part]           = scales[part] * float(_mm512_reduce_add_epi32(_mm512_zextsi256_si512(four)));
        }
        to.scales = _mm256_load_ps(scales);
        to.sums   = _mm256_load_ps(sums);
    }

    struct Sum {
        __m512 lanes  = _mm512_setzero_ps();
        __m256 minima = _mm256_setzero_ps();

        void add(const Weight & w, const Column & x) {
            const __m512 scales = _mm512_castps256_ps512(_mm256_mul_ps(w.scales, x.scales));
            minima              = _mm256_fmadd_ps(w.minima, x.sums, minima);
            for (int i = 0; i < 4; ++i) {
                const int     part   = i / 2 * 4 + i % 2;
                const __m512i places = _mm512_inserti64x4(_mm512_set1_epi32(part), _mm256_set1_epi32(part + 2), 1);
                const __m512  of     = products(_mm512_setzero_si512(), w.whole[i], bytes_at(x.whole[i]));
                lanes                = _mm512_fmadd_ps(of, _mm512_permutexvar_ps(places, scales), lanes);
            }
        }

        float total() const {
            return _mm512_reduce_add_ps(lanes) - _mm512_reduce_add_ps(_mm512_zextps256_ps512(minima));
        }
    };
};

// A block.
struct Q6_K {
    static constexpr int values = 256, bytes = 210;

    struct Column {
        int8_t  whole[4][64];
        __m512i starts[4];
        __m512  scales; // of parts of 16
    };

    struct Weight {
        __m512i whole[4];
        __m512  scales;

        explicit Weight(const char * p) {
            const auto shifts = [](int a, int b) {
                return _mm512_inserti64x4(_mm512_set1_epi16(short(a)), _mm256_set1_epi16(short(b)), 1);
            };
            const auto with = [](__m512i four, __m512i two) {
                return _mm512_or_si512(four, _mm512_and_si512(two, _mm512_set1_epi8(0x30)));
            };
            for (int i = 0; i < 2; ++i) {
                const __m512i v = bytes_at(p + 64 * i);
                const __m512i more =
                    _mm512_broadcast_i64x4(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p + 128 + 32 * i)));
                whole[2 * i]     = with(low(v), _mm512_sllv_epi16(more, shifts(4, 2)));
                whole[2 * i + 1] = with(high(v), _mm512_srlv_epi16(more, shifts(0, 2)));
            }
            const __m512 parts = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(part_at(p + 192)));
            scales             = _mm512_mul_ps(parts, _mm512_set1_ps(half_at(p + 208)));
        }
    };

    static void quantise(const float * x, Column & to) {
        alignas(64) float scales[16];
        for (int part = 0; part < 8; ++part) {
            scales[2 * part] = scales[2 * part + 1] = as_bytes(x + 32 * part, to.whole[part / 2] + part % 2 * 32);
        }
        for (int i = 0; i < 4; ++i) {
            to.starts[i] = start_of(to.whole[i], 32);
        }
        to.scales = _mm512_load_ps(scales);
    }

    struct Sum {
        __m512 lanes = _mm512_setzero_ps();

        void add(const Weight & w, const Column & x) {
            const __m512 scales = _mm512_mul_ps(w.scales, x.scales);
            for (int i = 0; i < 4; ++i) {
                const __m512i lane   = _mm512_set_epi32(3, 3, 3, 3, 2, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0, 0);
                const __m512i places = _mm512_add_epi32(lane, _mm512_set1_epi32(4 * i));
                const __m512  of     = products(x.starts[i], w.whole[i], bytes_at(x.whole[i]));
                lanes                = _mm512_fmadd_ps(of, _mm512_permutexvar_ps(places, scales), lanes);
            }
        }

        float total() const { return _mm512_reduce_add_ps(lanes); }
    };
};

} // namespace
