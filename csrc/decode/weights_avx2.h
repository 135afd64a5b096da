// Groups of 256 values of quantised weights as vectors of bytes, and columns in the same order. AVX2, with AVX-VNNI
// where the file that includes it is compiled for that. Everything is local to that file.
//
// A group has parts with a scale each: eight of 32 values, or sixteen of 16. Each vector holds four values of every
// part (of sixteen parts: of eight), always in the same lanes. So the products of all vectors are added lane by lane,
// and one conversion and one scale for each lane do for a group. A weight's byte is its value plus an offset. A sum of
// products begins with minus the offset times the column's values (`start`).
#pragma once

#include "block_values.h"
#include "thin_task.h"

#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

namespace {

using Lanes = __m256;

constexpr int rows_at_once = 1; // there are half as many registers as with AVX-512
#if defined(__AVXVNNI__)
constexpr bool has_vnni = true;
#else
constexpr bool has_vnni = false;
#endif

OA_INLINE float total(__m256 v) {
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    const __m128 two  = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

OA_INLINE __m256i bytes_at(const void * p) {
    return _mm256_loadu_si256(static_cast<const __m256i *>(p));
}

// Two times 16 bytes, `stride` apart.
OA_INLINE __m256i parts_at(const char * p, int stride) {
    return _mm256_loadu2_m128i(reinterpret_cast<const __m128i *>(p + stride), reinterpret_cast<const __m128i *>(p));
}

OA_INLINE __m256i low(__m256i v) {
    return _mm256_and_si256(v, _mm256_set1_epi8(15));
}

OA_INLINE __m256i high(__m256i v) {
    return low(_mm256_srli_epi16(v, 4));
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

struct ColumnGroup {
    int8_t whole[8][32];
    struct {
        __m256i start; // of types with minima: the sums of lanes, times the scale
        __m256  scales;
    } sets[2]; // eight parts have one
};

// Even parts have the first four lanes, odd ones the others.
constexpr int lane_of(int part) {
    return part / 2 + part % 2 * 4;
}

// 256 values, with scales for 32 of them each.
template <int n_sets, int offset> void quantise_group(const float * x, ColumnGroup & to) {
    alignas(32) float scales[n_sets][8];
    for (int i = 0; i < 8; ++i) {
        int8_t      whole[32];
        const float scale = as_bytes(x + 32 * i, whole);
        for (int four = 0; four < 8; ++four) {
            const int part = n_sets == 1 ? i : 2 * i + four / 4, set = part / 8, lane = lane_of(part % 8);
            const int vector = n_sets == 1 ? four : 4 * set + four % 4;
            memcpy(to.whole[vector] + 4 * lane, whole + 4 * four, 4);
            scales[set][lane] = scale;
        }
    }
    for (int set = 0; set < n_sets; ++set) {
        __m256i sums = _mm256_setzero_si256();
        for (int k = 0; k < 8 / n_sets; ++k) {
            const __m256i pairs = _mm256_maddubs_epi16(_mm256_set1_epi8(1), bytes_at(to.whole[8 / n_sets * set + k]));
            sums                = _mm256_add_epi32(sums, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
        }
        to.sets[set].start  = _mm256_mullo_epi32(sums, _mm256_set1_epi32(-offset));
        to.sets[set].scales = _mm256_load_ps(scales[set]);
    }
}

template <int n_sets> struct RowGroup {
    static constexpr bool minima = false;

    __m256i whole[8];
    __m256  scales[n_sets];
};

// Its values are scale times byte minus minimum.
struct RowGroupWithMinima : RowGroup<1> {
    static constexpr bool minima = true;

    __m256 least;
};

// start + products of `n` vectors of a weight's bytes up to `most` with a column's; or of signed bytes, most = -128.
template <int n, int most>
OA_INLINE __m256i products(__m256i start, const __m256i * weight, const int8_t (*column)[32]) {
#if defined(__AVXVNNI__)
#pragma GCC unroll 8
    for (int k = 0; k < n; ++k) {
        start = _mm256_dpbusd_avx_epi32(start, weight[k], bytes_at(column[k]));
    }
#else
    // So many sums of two products do not leave 16 bits.
    constexpr int together = most < 0 ? 1 : 32767 / (2 * most * 127);
    __m256i       pairs    = _mm256_setzero_si256();
#pragma GCC unroll 8
    for (int k = 0; k < n; ++k) {
        const __m256i x  = bytes_at(column[k]);
        const __m256i of = most < 0 ? _mm256_maddubs_epi16(_mm256_abs_epi8(weight[k]), _mm256_sign_epi8(x, weight[k])) :
                                      _mm256_maddubs_epi16(weight[k], x);
        pairs            = k % together ? _mm256_add_epi16(pairs, of) : of;
        if (k % together == together - 1 || k == n - 1) {
            start = _mm256_add_epi32(start, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
        }
    }
#endif
    return start;
}

// Adds the products of a row's group with a column's.
template <class Type, class Row> OA_INLINE void add_column(__m256 & sum, const Row & row, const ColumnGroup & x) {
    constexpr int n = 8 / Type::n_sets;
#pragma GCC unroll 2
    for (int set = 0; set < Type::n_sets; ++set) {
        __m256i start = x.sets[set].start;
        if constexpr (Row::minima) {
            sum   = _mm256_fnmadd_ps(row.least, _mm256_castsi256_ps(start), sum);
            start = _mm256_setzero_si256();
        }
        const __m256i of = products<n, Type::most>(start, row.whole + n * set, x.whole + n * set);
        sum = _mm256_fmadd_ps(_mm256_cvtepi32_ps(of), _mm256_mul_ps(row.scales[set], x.sets[set].scales), sum);
    }
}

// Group i of C columns with that of a row.
template <class Type, int N, int C>
OA_INLINE void add(__m256 (&sums)[N][C], const char * const (&rows)[N], const ColumnGroup * const (&columns)[C],
                   int64_t i) {
    static_assert(N == 1);
    const auto row = Type::row(rows[0]);
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) {
        add_column<Type>(sums[0][c], row, columns[c][i]);
    }
}

// Of four vectors the first four bytes of each quarter, then the second four, and so on.
OA_INLINE void transpose(__m256i a, __m256i b, __m256i c, __m256i d, __m256i * to) {
    const __m256i ab = _mm256_unpacklo_epi32(a, b), cd = _mm256_unpacklo_epi32(c, d);
    const __m256i AB = _mm256_unpackhi_epi32(a, b), CD = _mm256_unpackhi_epi32(c, d);
    to[0] = _mm256_unpacklo_epi64(ab, cd);
    to[1] = _mm256_unpackhi_epi64(ab, cd);
    to[2] = _mm256_unpacklo_epi64(AB, CD);
    to[3] = _mm256_unpackhi_epi64(AB, CD);
}

// 16 bytes of each of eight blocks, `stride` apart.
OA_INLINE void read_blocks(const char * p, int stride, __m256i * to) {
    transpose(parts_at(p, stride), parts_at(p + 2 * stride, stride), parts_at(p + 4 * stride, stride),
              parts_at(p + 6 * stride, stride), to);
}

// Low halves are the first 16 values of a block.
OA_INLINE void read_halves(const char * p, int stride, __m256i (&to)[8]) {
    __m256i both[4];
    read_blocks(p, stride, both);
#pragma GCC unroll 4
    for (int k = 0; k < 4; ++k) {
        to[k]     = low(both[k]);
        to[4 + k] = high(both[k]);
    }
}

// The first number of each of eight blocks.
OA_INLINE __m256 halves_of_blocks(const char * p, int stride) {
    const auto at = [&](int block) { return value_at<int16_t>(p + block * stride); };
    return _mm256_cvtph_ps(_mm_setr_epi16(at(0), at(2), at(4), at(6), at(1), at(3), at(5), at(7)));
}

// Eight blocks are a group.
struct Blocks {
    static constexpr int n_sets = 1, block_values = 32;
};

struct Q4_0 : Blocks {
    static constexpr int block_bytes = 18, most = 15;

    static void quantise(const float * x, ColumnGroup & to) { quantise_group<1, 8>(x, to); }

    OA_INLINE static RowGroup<1> row(const char * p) {
        RowGroup<1> made;
        read_halves(p + 2, block_bytes, made.whole);
        made.scales[0] = halves_of_blocks(p, block_bytes);
        return made;
    }
};

struct Q8_0 : Blocks {
    // Without VNNI products of two bytes up to 255 leave 16 bits: the weight's signs go to the column.
    static constexpr int block_bytes = 34, most = has_vnni ? 255 : -128;

    static void quantise(const float * x, ColumnGroup & to) { quantise_group<1, has_vnni ? 128 : 0>(x, to); }

    OA_INLINE static RowGroup<1> row(const char * p) {
        RowGroup<1> made;
        read_blocks(p + 2, block_bytes, made.whole);
        read_blocks(p + 18, block_bytes, made.whole + 4);
        for (auto & whole : made.whole) {
            whole = has_vnni ? _mm256_xor_si256(whole, _mm256_set1_epi8(char(0x80))) : whole;
        }
        made.scales[0] = halves_of_blocks(p, block_bytes);
        return made;
    }
};

// Scales of MXFP4 by their byte e: half of 2^(e - 127), since values are looked up as twice what they are.
struct HalvesOfPowers {
    float of[256] = { 0x1p-128f };

    constexpr HalvesOfPowers() {
        for (int e = 1; e < 256; ++e) {
            of[e] = 2.0f * of[e - 1];
        }
    }
};

constexpr HalvesOfPowers halves_of_powers;

struct MXFP4 : Blocks {
    static constexpr int block_bytes = 17, most = 24;

    static void quantise(const float * x, ColumnGroup & to) { quantise_group<1, 12>(x, to); }

    OA_INLINE static RowGroup<1> row(const char * p) {
        // Twice the values of E2M1, plus the offset.
        const __m128i table = _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0);
        const auto    scale = [&](int block) { return halves_of_powers.of[uint8_t(p[block * block_bytes])]; };
        RowGroup<1>   made;
        read_halves(p + 1, block_bytes, made.whole);
        for (auto & whole : made.whole) {
            whole = _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), whole);
        }
        made.scales[0] = _mm256_setr_ps(scale(0), scale(2), scale(4), scale(6), scale(1), scale(3), scale(5), scale(7));
        return made;
    }
};

// A block: eight parts.
struct Q4_K {
    static constexpr int n_sets = 1, block_values = 256, block_bytes = 144, most = 15;

    static void quantise(const float * x, ColumnGroup & to) {
        quantise_group<1, -1>(x, to);
        auto & set = to.sets[0];
        set.start  = _mm256_castps_si256(_mm256_mul_ps(_mm256_cvtepi32_ps(set.start), set.scales));
    }

    OA_INLINE static RowGroupWithMinima row(const char * p) {
        RowGroupWithMinima made;
        __m256i            both[4];
        const auto         two_parts = [&](int i) { return bytes_at(p + 16 + 32 * i); };
        transpose(two_parts(0), two_parts(1), two_parts(2), two_parts(3), both);
#pragma GCC unroll 4
        for (int k = 0; k < 4; ++k) { // low halves are even parts
            made.whole[k]     = _mm256_permute2x128_si256(low(both[k]), high(both[k]), 0x20);
            made.whole[4 + k] = _mm256_permute2x128_si256(low(both[k]), high(both[k]), 0x31);
        }
        const uint64_t a = value_at<uint32_t>(p + 4), b = value_at<uint32_t>(p + 8), c = value_at<uint32_t>(p + 12);
        made.scales[0] = parts(a, c & 0x0f0f0f0f, half_at(p));
        made.least     = parts(b, c >> 4 & 0x0f0f0f0f, half_at(p + 2));
        return made;
    }

    // Six bits of each part: all of the first four; low ones of the others, whose two high ones lie in the first.
    OA_INLINE static __m256 parts(uint64_t first, uint64_t second, float scale) {
        const uint64_t all   = (first & 0x3f3f3f3f) | (second | (first >> 2 & 0x30303030)) << 32;
        const __m128i  lanes = _mm_shuffle_epi8(_mm_cvtsi64_si128(int64_t(all)),
                                                _mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, -1, -1, -1, -1, -1, -1, -1, -1));
        return _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(lanes)), _mm256_set1_ps(scale));
    }
};

// A block: sixteen parts.
struct Q6_K {
    static constexpr int n_sets = 2, block_values = 256, block_bytes = 210, most = 63;

    static void quantise(const float * x, ColumnGroup & to) { quantise_group<2, 32>(x, to); }

    OA_INLINE static RowGroup<2> row(const char * p) {
        const auto with = [](__m256i four, __m256i two) {
            return _mm256_or_si256(four, _mm256_and_si256(two, _mm256_set1_epi8(0x30)));
        };
        const __m128i order = _mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, -1, -1, -1, -1, -1, -1, -1, -1);
        RowGroup<2>   made;
#pragma GCC unroll 2
        for (int set = 0; set < 2; ++set) {
            const __m256i a = bytes_at(p + 64 * set), b = bytes_at(p + 64 * set + 32),
                          two = bytes_at(p + 128 + 32 * set);
            transpose(with(low(a), _mm256_slli_epi16(two, 4)), with(low(b), _mm256_slli_epi16(two, 2)),
                      with(high(a), two), with(high(b), _mm256_srli_epi16(two, 2)), made.whole + 4 * set);
            const __m128i parts = _mm_loadl_epi64(reinterpret_cast<const __m128i *>(p + 192 + 8 * set));
            const __m256i whole = _mm256_cvtepi8_epi32(_mm_shuffle_epi8(parts, order));
            made.scales[set]    = _mm256_mul_ps(_mm256_cvtepi32_ps(whole), _mm256_set1_ps(half_at(p + 208)));
        }
        return made;
    }
};

} // namespace
