// Groups of 256 values of quantised weights as vectors of bytes for VNNI, and columns in the same order. AVX-512 only.
// Everything is local to the file that includes it.
//
// A group has parts with a scale each. Each of its four vectors holds a piece of every part, always in the same lanes.
// So the products of all four are added lane by lane, and one conversion and one scale for each lane do for a group.
// A weight's byte is its value plus an offset. A sum of products begins with minus the offset times the column's
// values (`start`).
#pragma once

#include "block_values.h"
#include "thin_task.h"

#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

namespace {

using Lanes = __m512;

constexpr int rows_at_once = 2;

OA_INLINE float total(__m512 lanes) {
    return _mm512_reduce_add_ps(lanes);
}

OA_INLINE __m512i bytes_at(const void * p) {
    return _mm512_loadu_si512(p);
}

OA_INLINE __m128i part_at(const void * p) {
    return _mm_loadu_si128(static_cast<const __m128i *>(p));
}

// Four times 16 bytes, `stride` apart.
OA_INLINE __m512i parts_at(const char * p, int stride) {
    __m512i v = _mm512_castsi128_si512(part_at(p));
    v         = _mm512_inserti32x4(v, part_at(p + stride), 1);
    v         = _mm512_inserti32x4(v, part_at(p + 2 * stride), 2);
    return _mm512_inserti32x4(v, part_at(p + 3 * stride), 3);
}

OA_INLINE __m512i low(__m512i v) {
    return _mm512_and_si512(v, _mm512_set1_epi8(15));
}

OA_INLINE __m512i high(__m512i v) {
    return low(_mm512_srli_epi16(v, 4));
}

// Words from eight blocks, twice each, for their two lanes. Places 0 to 31 are in `a`, others in `b`.
OA_INLINE __m256i words_of_blocks(__m512i a, __m512i b, int b0, int b1, int b2, int b3, int b4, int b5, int b6,
                                  int b7) {
    const __m256i once  = _mm256_setr_epi32(b0, b1, b2, b3, b4, b5, b6, b7);
    const __m256i twice = _mm256_mullo_epi32(once, _mm256_set1_epi32(0x10001));
    return _mm512_castsi512_si256(_mm512_permutex2var_epi16(a, _mm512_zextsi256_si512(twice), b));
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

// Eight parts of 32 values. Part p has lanes 2 p and 2 p + 1: of vector k its values 8 k to 8 k + 7.
struct Eighths {
    static constexpr int vector(int four) { return four / 2; } // of the part's `four`-th four values
    static constexpr int lane(int part, int four) { return 2 * part + four % 2; }
};

// Sixteen parts of 16 values. Each has a lane: of vector k its values 4 k to 4 k + 3. In a quarter of a register lie
// parts i, 8 + i, 4 + i and 12 + i.
struct Sixteenths {
    static constexpr int vector(int four) { return four % 4; }
    static constexpr int lane(int part, int four) {
        const int sixteenth = 2 * part + four / 4;
        return sixteenth % 4 * 4 + sixteenth / 4 % 2 * 2 + sixteenth / 8;
    }
};

struct ColumnGroup {
    int8_t  whole[4][64];
    __m512i start; // of types with minima: the sums of lanes, times the scale
    __m512  scales;
};

// 256 values, with scales for 32 of them each.
template <class Order, int offset> void quantise_group(const float * x, ColumnGroup & to) {
    alignas(64) float scales[16];
    for (int part = 0; part < 8; ++part) {
        int8_t      whole[32];
        const float scale = as_bytes(x + 32 * part, whole);
        for (int four = 0; four < 8; ++four) {
            const int lane = Order::lane(part, four);
            memcpy(to.whole[Order::vector(four)] + 4 * lane, whole + 4 * four, 4);
            scales[lane] = scale;
        }
    }
    __m512i sums = _mm512_setzero_si512();
    for (const auto & whole : to.whole) {
        sums = _mm512_dpbusd_epi32(sums, _mm512_set1_epi8(1), bytes_at(whole));
    }
    to.start  = _mm512_mullo_epi32(sums, _mm512_set1_epi32(-offset));
    to.scales = _mm512_load_ps(scales);
}

struct RowGroup {
    __m512i whole[4];
    __m512  scales;
};

// Its values are scale times byte minus minimum.
struct RowGroupWithMinima : RowGroup {
    __m512 minima;
};

// Keeps a compiler from loading it again for each row.
template <class Vector> OA_INLINE Vector kept(Vector v) {
    asm("" : "+v"(v));
    return v;
}

// Adds the products of N rows' groups with column c's.
template <class Row, int N, int C>
OA_INLINE void add_column(__m512 (&sums)[N][C], int c, const Row (&rows)[N], const ColumnGroup & x) {
    constexpr bool minima = std::is_same_v<Row, RowGroupWithMinima>;
    const auto     load   = [](const auto & v) { return N > 1 ? kept(v) : v; };
    const __m512i  start  = load(x.start);
    __m512i        of[N];
#pragma GCC unroll 4
    for (int r = 0; r < N; ++r) {
        of[r] = minima ? _mm512_setzero_si512() : start;
    }
#pragma GCC unroll 4
    for (int k = 0; k < 4; ++k) {
        const __m512i whole = load(bytes_at(x.whole[k]));
#pragma GCC unroll 4
        for (int r = 0; r < N; ++r) {
            of[r] = _mm512_dpbusd_epi32(of[r], rows[r].whole[k], whole);
        }
    }
    const __m512 scales = load(x.scales);
#pragma GCC unroll 4
    for (int r = 0; r < N; ++r) {
        __m512 & sum = sums[r][c];
        if constexpr (minima) {
            sum = _mm512_fnmadd_ps(rows[r].minima, _mm512_castsi512_ps(start), sum);
        }
        sum = _mm512_fmadd_ps(_mm512_cvtepi32_ps(of[r]), _mm512_mul_ps(rows[r].scales, scales), sum);
    }
}

// Group i of C columns with that of N rows.
template <class Type, int N, int C>
OA_INLINE void add(__m512 (&sums)[N][C], const char * const (&rows)[N], const ColumnGroup * const (&columns)[C],
                   int64_t i) {
    decltype(Type::row(nullptr)) read[N];
#pragma GCC unroll 4
    for (int r = 0; r < N; ++r) {
        read[r] = Type::row(rows[r]);
    }
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) {
        add_column(sums, c, read, columns[c][i]);
    }
}

// Vectors of a weight whose blocks have 16 bytes, `stride` apart: low halves are the first 16 values.
OA_INLINE void read_halves(const char * p, int stride, __m512i (&to)[4]) {
    const __m512i even = parts_at(p, 2 * stride), odd = parts_at(p + stride, 2 * stride);
    const __m512i first = _mm512_unpacklo_epi64(even, odd), second = _mm512_unpackhi_epi64(even, odd);
    to[0] = low(first);
    to[1] = low(second);
    to[2] = high(first);
    to[3] = high(second);
}

// Eight blocks are a group.
struct Blocks {
    static constexpr int block_values = 32;
};

struct Q4_0 : Blocks {
    static constexpr int block_bytes = 18;

    static void quantise(const float * x, ColumnGroup & to) { quantise_group<Eighths, 8>(x, to); }

    OA_INLINE static RowGroup row(const char * p) {
        RowGroup made;
        made.scales = _mm512_cvtph_ps(words_of_blocks(bytes_at(p), bytes_at(p + 64), 0, 9, 18, 27, 36, 45, 54, 63));
        read_halves(p + 2, block_bytes, made.whole);
        return made;
    }
};

struct Q8_0 : Blocks {
    static constexpr int block_bytes = 34;

    static void quantise(const float * x, ColumnGroup & to) { quantise_group<Eighths, 128>(x, to); }

    OA_INLINE static RowGroup row(const char * p) {
        const __m256i first  = words_of_blocks(bytes_at(p), bytes_at(p + 64), 0, 17, 34, 51, 0, 0, 0, 0);
        const __m256i second = words_of_blocks(bytes_at(p + 128), bytes_at(p + 192), 0, 0, 0, 0, 4, 21, 38, 55);
        const __m512i a = two_blocks(p, 0), b = two_blocks(p, 1), c = two_blocks(p, 4), d = two_blocks(p, 5);
        const __m512i even[] = { _mm512_unpacklo_epi64(a, b), _mm512_unpacklo_epi64(c, d) };
        const __m512i odd[]  = { _mm512_unpackhi_epi64(a, b), _mm512_unpackhi_epi64(c, d) };
        RowGroup      made;
        made.scales   = _mm512_cvtph_ps(_mm256_blend_epi32(first, second, 0xf0));
        made.whole[0] = _mm512_shuffle_i64x2(even[0], even[1], 0x88);
        made.whole[1] = _mm512_shuffle_i64x2(odd[0], odd[1], 0x88);
        made.whole[2] = _mm512_shuffle_i64x2(even[0], even[1], 0xdd);
        made.whole[3] = _mm512_shuffle_i64x2(odd[0], odd[1], 0xdd);
        return made;
    }

    // Block i and the one after the next.
    OA_INLINE static __m512i two_blocks(const char * p, int i) {
        const auto at = [&](int block) {
            return _mm256_loadu_si256(reinterpret_cast<const __m256i *>(p + 2 + block_bytes * block));
        };
        const __m512i v = _mm512_inserti64x4(_mm512_castsi256_si512(at(i)), at(i + 2), 1);
        return _mm512_xor_si512(v, _mm512_set1_epi8(char(0x80)));
    }
};

struct MXFP4 : Blocks {
    static constexpr int block_bytes = 17;

    static void quantise(const float * x, ColumnGroup & to) { quantise_group<Eighths, 12>(x, to); }

    OA_INLINE static RowGroup row(const char * p) {
        // Every other byte is the upper one of its word.
        const __m256i words  = words_of_blocks(bytes_at(p), bytes_at(p + 64), 0, 8, 17, 25, 34, 42, 51, 59);
        const __m512i shifts = _mm512_set_epi32(8, 8, 0, 0, 8, 8, 0, 0, 8, 8, 0, 0, 8, 8, 0, 0);
        const __m512i bytes  = _mm512_srlv_epi32(_mm512_cvtepu16_epi32(words), shifts);
        // Twice the values of E2M1, plus the offset.
        const __m512i table =
            _mm512_broadcast_i32x4(_mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0));
        RowGroup made;
        made.scales = halves_of_powers(_mm512_and_si512(bytes, _mm512_set1_epi32(255)));
        read_halves(p + 1, block_bytes, made.whole);
        for (auto & whole : made.whole) {
            whole = _mm512_shuffle_epi8(table, whole);
        }
        return made;
    }

    // Half of 2^(e - 127), since values are looked up as twice what they are. The first two are denormal.
    OA_INLINE static __m512 halves_of_powers(__m512i e) {
        const __m512i   normal = _mm512_slli_epi32(_mm512_sub_epi32(e, _mm512_set1_epi32(1)), 23);
        const __mmask16 small  = _mm512_cmplt_epi32_mask(e, _mm512_set1_epi32(2));
        return _mm512_castsi512_ps(_mm512_mask_sllv_epi32(normal, small, _mm512_set1_epi32(0x00200000), e));
    }
};

// A block: eight parts.
struct Q4_K {
    static constexpr int block_values = 256, block_bytes = 144;

    static void quantise(const float * x, ColumnGroup & to) {
        quantise_group<Eighths, -1>(x, to);
        to.start = _mm512_castps_si512(_mm512_mul_ps(_mm512_cvtepi32_ps(to.start), to.scales));
    }

    OA_INLINE static RowGroupWithMinima row(const char * p) {
        const __m512i a = bytes_at(p + 16), b = bytes_at(p + 80);
        // Low halves are parts 0, 2, 4, 6, high ones 1, 3, 5, 7, with 32 bytes for each two.
        const __m512i      first = _mm512_shuffle_i64x2(a, b, 0x88), second = _mm512_shuffle_i64x2(a, b, 0xdd);
        RowGroupWithMinima made;
        made.whole[0] = _mm512_unpacklo_epi64(low(first), high(first));
        made.whole[1] = _mm512_unpackhi_epi64(low(first), high(first));
        made.whole[2] = _mm512_unpacklo_epi64(low(second), high(second));
        made.whole[3] = _mm512_unpackhi_epi64(low(second), high(second));

        const uint64_t x = value_at<uint32_t>(p + 4), y = value_at<uint32_t>(p + 8), z = value_at<uint32_t>(p + 12);
        made.scales = parts(x, z & 0x0f0f0f0f, half_at(p));
        made.minima = parts(y, z >> 4 & 0x0f0f0f0f, half_at(p + 2));
        return made;
    }

    // Six bits of each part: all of the first four; low ones of the others, whose two high ones lie in the first.
    OA_INLINE static __m512 parts(uint64_t first, uint64_t second, float scale) {
        const uint64_t all  = (first & 0x3f3f3f3f) | (second | (first >> 2 & 0x30303030)) << 32;
        const __m128i  once = _mm_cvtsi64_si128(int64_t(all)), twice = _mm_unpacklo_epi8(once, once);
        return _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(twice)), _mm512_set1_ps(scale));
    }
};

// A block: sixteen parts.
struct Q6_K {
    static constexpr int block_values = 256, block_bytes = 210;

    static void quantise(const float * x, ColumnGroup & to) { quantise_group<Sixteenths, 32>(x, to); }

    OA_INLINE static RowGroup row(const char * p) {
        const auto shifts = [](int a, int b) {
            return _mm512_inserti64x4(_mm512_set1_epi16(short(a)), _mm256_set1_epi16(short(b)), 1);
        };
        const auto with = [](__m512i four, __m512i two) {
            return _mm512_or_si512(four, _mm512_and_si512(two, _mm512_set1_epi8(0x30)));
        };
        const auto more_at = [&](int half) {
            return _mm512_broadcast_i64x4(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p + 128 + 32 * half)));
        };
        const __m512i four[] = { bytes_at(p), bytes_at(p + 64) }, two[] = { more_at(0), more_at(1) };
        const auto    put = [&](__m512i fours, __m512i twos, __m512i & first, __m512i & second) {
            const __m512i a = with(low(fours), _mm512_sllv_epi16(twos, shifts(4, 2)));
            const __m512i b = with(high(fours), _mm512_srlv_epi16(twos, shifts(0, 2)));
            first           = _mm512_unpacklo_epi64(a, b);
            second          = _mm512_unpackhi_epi64(a, b);
        };
        RowGroup made;
        put(_mm512_unpacklo_epi32(four[0], four[1]), _mm512_unpacklo_epi32(two[0], two[1]), made.whole[0],
            made.whole[1]);
        put(_mm512_unpackhi_epi32(four[0], four[1]), _mm512_unpackhi_epi32(two[0], two[1]), made.whole[2],
            made.whole[3]);
        const __m128i order  = _mm_setr_epi8(0, 8, 4, 12, 1, 9, 5, 13, 2, 10, 6, 14, 3, 11, 7, 15);
        const __m128i scales = _mm_shuffle_epi8(part_at(p + 192), order);
        made.scales = _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(scales)), _mm512_set1_ps(half_at(p + 208)));
        return made;
    }
};

} // namespace
