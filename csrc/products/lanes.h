// Vectors of 32-bit lanes for one instruction set, the one that this file is compiled for. A lane belongs to a row of
// the weight. Everything is local to the file that includes it, so that the linker cannot take a function made for a
// later CPU.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

#if defined(__AVX512VNNI__)
constexpr int width = 16, tile_columns = 6, groups_at_once = 8;
#elif defined(__AVXVNNI__)
constexpr int width = 8, tile_columns = 4, groups_at_once = 8;
#elif defined(__AVX2__)
constexpr int width = 8, tile_columns = 4, groups_at_once = 2; // with more, GCC keeps sums in memory
#else
constexpr int width = 4, tile_columns = 4, groups_at_once = 2;
#endif

typedef float   Floats __attribute__((vector_size(4 * width)));
typedef int32_t Ints __attribute__((vector_size(4 * width)));
typedef int16_t Shorts __attribute__((vector_size(4 * width)));
typedef uint8_t Bytes __attribute__((vector_size(4 * width)));
typedef int8_t  SignedBytes __attribute__((vector_size(4 * width)));
typedef Floats  FloatsAnywhere __attribute__((aligned(4), may_alias));

inline Floats load(const float * p) {
    return *reinterpret_cast<const FloatsAnywhere *>(p);
}

inline void store(float * p, Floats v) {
    *reinterpret_cast<FloatsAnywhere *>(p) = v;
}

inline Floats all(float x) {
    return x - Floats{};
}

inline Ints all(int32_t x) {
    return x - Ints{};
}

inline Bytes all_bytes(uint8_t x) {
    return x - Bytes{};
}

inline Floats floats(Ints v) {
    return __builtin_convertvector(v, Floats);
}

// Half floats, one in the low 16 bits of each lane.
inline Floats from_halves(Ints v) {
#if defined(__AVX512VNNI__)
    return (Floats) _mm512_cvtph_ps(_mm512_cvtepi32_epi16((__m512i) v));
#elif defined(__AVX2__)
    const __m256i low = (__m256i) (v & 0xffff);
    const __m256i all = _mm256_permute4x64_epi64(_mm256_packus_epi32(low, low), 0x08);
    return (Floats) _mm256_cvtph_ps(_mm256_castsi256_si128(all));
#else
    // A half's exponent and fraction at a float's place, then times 2^112; infinities and NaN stay.
    const Ints magnitude = (v & 0x7fff) << 13, sign = (v & 0x8000) << 16;
    const Ints scaled = (Ints) ((Floats) magnitude * 5.192296858534828e33f);
    return (Floats) (scaled | ((magnitude >= (0x7c00 << 13)) & 0x7f800000) | sign);
#endif
}

// Across the lanes of a vector.
inline int32_t sum_of(Ints v) {
#if defined(__AVX512VNNI__)
    return _mm512_reduce_add_epi32((__m512i) v);
#elif defined(__AVX2__)
    __m128i x = _mm_add_epi32(_mm256_castsi256_si128((__m256i) v), _mm256_extracti128_si256((__m256i) v, 1));
    x         = _mm_add_epi32(x, _mm_unpackhi_epi64(x, x));
    return _mm_cvtsi128_si32(_mm_add_epi32(x, _mm_shuffle_epi32(x, 1)));
#else
    return int32_t(uint32_t(v[0]) + uint32_t(v[1]) + uint32_t(v[2]) + uint32_t(v[3]));
#endif
}

// Goes round where values are not finite: what comes of those means nothing.
inline int32_t times(int32_t a, int32_t b) {
    return int32_t(uint32_t(a) * uint32_t(b));
}

inline int32_t largest_of(Ints v) {
#if defined(__AVX512VNNI__)
    return _mm512_reduce_max_epi32((__m512i) v);
#elif defined(__AVX2__)
    __m128i x = _mm_max_epi32(_mm256_castsi256_si128((__m256i) v), _mm256_extracti128_si256((__m256i) v, 1));
    x         = _mm_max_epi32(x, _mm_unpackhi_epi64(x, x));
    return _mm_cvtsi128_si32(_mm_max_epi32(x, _mm_shuffle_epi32(x, 1)));
#else
    const int32_t a = v[0] > v[1] ? v[0] : v[1], b = v[2] > v[3] ? v[2] : v[3];
    return a > b ? a : b;
#endif
}

// out[i]: bytes 4 i .. 4 i + 3 of 16 bytes of each row, a lane per row.
inline void transposed(const char * const * rows, size_t offset, Bytes * out) {
#if defined(__AVX2__)
    const auto of = [&](int r) { return _mm_loadu_si128(reinterpret_cast<const __m128i *>(rows[r] + offset)); };
#if defined(__AVX512VNNI__)
    const auto four = [&](int r) {
        __m512i v = _mm512_castsi128_si512(of(r));
        v         = _mm512_inserti32x4(v, of(r + 4), 1);
        v         = _mm512_inserti32x4(v, of(r + 8), 2);
        return _mm512_inserti32x4(v, of(r + 12), 3);
    };
#define OA_UNPACK(half, size, a, b) _mm512_unpack##half##_##size(a, b)
#else
    const auto four = [&](int r) { return _mm256_inserti128_si256(_mm256_castsi128_si256(of(r)), of(r + 4), 1); };
#define OA_UNPACK(half, size, a, b) _mm256_unpack##half##_##size(a, b)
#endif
    const auto a = four(0), b = four(1), c = four(2), d = four(3);
    const auto ab_low = OA_UNPACK(lo, epi32, a, b), ab_high = OA_UNPACK(hi, epi32, a, b);
    const auto cd_low = OA_UNPACK(lo, epi32, c, d), cd_high = OA_UNPACK(hi, epi32, c, d);
    out[0] = (Bytes) OA_UNPACK(lo, epi64, ab_low, cd_low);
    out[1] = (Bytes) OA_UNPACK(hi, epi64, ab_low, cd_low);
    out[2] = (Bytes) OA_UNPACK(lo, epi64, ab_high, cd_high);
    out[3] = (Bytes) OA_UNPACK(hi, epi64, ab_high, cd_high);
#undef OA_UNPACK
#else
    for (int i = 0; i < 4; ++i) {
        for (int r = 0; r < width; ++r) {
            memcpy(reinterpret_cast<char *>(out + i) + 4 * r, rows[r] + offset + 4 * i, 4);
        }
    }
#endif
}

// table[index], indices below 16.
inline Bytes looked_up(const uint8_t * table, Bytes index) {
#if defined(__AVX512VNNI__)
    const __m512i all_tables = _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i *>(table)));
    return (Bytes) _mm512_shuffle_epi8(all_tables, (__m512i) index);
#elif defined(__AVX2__)
    const __m256i all_tables = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i *>(table)));
    return (Bytes) _mm256_shuffle_epi8(all_tables, (__m256i) index);
#else
    Bytes found;
    for (int i = 0; i < 4 * width; ++i) {
        found[i] = table[index[i]];
    }
    return found;
#endif
}

// Sums of products of a block: in each lane, of four bytes of its row with the same four values of a column. A weight's
// byte is its value plus an offset, which the sum begins with: minus the offset times the column's values (`bias`).

#if defined(__AVX512VNNI__) || defined(__AVXVNNI__) || !defined(__AVX2__)

struct Sum {
    Ints lanes;

    static Sum begin(int32_t bias) { return { all(bias) }; }

    void add(Bytes w, Ints x) {
#if defined(__AVX512VNNI__)
        lanes = (Ints) _mm512_dpbusd_epi32((__m512i) lanes, (__m512i) w, (__m512i) x);
#elif defined(__AVXVNNI__)
        lanes = (Ints) _mm256_dpbusd_avx_epi32((__m256i) lanes, (__m256i) w, (__m256i) x);
#else
        const auto four = [&](int i) {
            const SignedBytes s = (SignedBytes) x;
            return w[i] * s[i] + w[i + 1] * s[i + 1] + w[i + 2] * s[i + 2] + w[i + 3] * s[i + 3];
        };
        lanes += Ints{ four(0), four(4), four(8), four(12) };
#endif
    }

    Ints total() const {
        return lanes;
    }

    static int32_t bias(Ints values, int offset) {
        return times(-offset, sum_of(values));
    }
};

using ByteSum                 = Sum;
constexpr uint8_t byte_offset = 128;

#else

// Two sums of 16 bits in each lane, of values 0, 1 and of 2, 3 of four. What is in between may pass 2^15 and comes
// back: the last value does not, as that of a weight is at most 12 and a block has 32, or 32 and a block has 16.
struct Sum {
    Shorts lanes;

    static Sum begin(int32_t bias) { return { (Shorts) all(bias) }; }

    void add(Bytes w, Ints x) { lanes += (Shorts) _mm256_maddubs_epi16((__m256i) w, (__m256i) x); }

    Ints total() const { return (Ints) _mm256_madd_epi16((__m256i) lanes, _mm256_set1_epi16(1)); }

    // Of values 0, 1 and of 2, 3 of each four.
    static int32_t bias(Ints values, int offset) {
        const Ints    first = { -1, -1, 0, 0, -1, -1, 0, 0 };
        const int32_t low = times(-offset, sum_of(values & first)), high = times(-offset, sum_of(values & ~first));
        return (low & 0xffff) | int32_t(uint32_t(high) << 16);
    }
};

// Weights of whole bytes, signed: their products fill 16 bits.
struct ByteSum {
    Ints lanes;

    static ByteSum begin(int32_t) { return { Ints{} }; }

    void add(Bytes w, Ints x) {
        const __m256i products =
            _mm256_maddubs_epi16(_mm256_abs_epi8((__m256i) w), _mm256_sign_epi8((__m256i) x, (__m256i) w));
        lanes += (Ints) _mm256_madd_epi16(products, _mm256_set1_epi16(1));
    }

    Ints total() const { return lanes; }

    static int32_t bias(Ints, int) { return 0; }
};

constexpr uint8_t byte_offset = 0;

#endif

} // namespace
