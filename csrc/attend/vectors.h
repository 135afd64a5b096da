// Vectors of floats for one instruction set, the one that this file is compiled for: compiler vector extensions, and
// intrinsics where a cache's type is widened. Everything is local to the file that includes it, so that the linker
// cannot take a function made for a later CPU.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__AVX2__) || defined(__AVX512F__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int width = 16, registers = 32;
#elif defined(__AVX2__)
constexpr int width = 8, registers = 16;
#elif defined(__ARM_NEON)
constexpr int width = 4, registers = 32;
#else
constexpr int width = 4, registers = 16;
#endif

typedef float   Floats __attribute__((vector_size(4 * width)));
typedef int32_t Ints __attribute__((vector_size(4 * width)));
typedef float   FourFloats __attribute__((vector_size(16)));
typedef Floats  FloatsAnywhere __attribute__((aligned(4), may_alias));
typedef Ints    IntsAnywhere __attribute__((aligned(4), may_alias));

inline Floats load(const float * p) {
    return *reinterpret_cast<const FloatsAnywhere *>(p);
}

inline void store(float * p, Floats v) {
    *reinterpret_cast<FloatsAnywhere *>(p) = v;
}

// GCC reads from memory again for every use of a value that it loaded. With AVX2 that takes longer than the products.
inline Floats in_register(Floats v) {
#if defined(__AVX2__) && !defined(__AVX512F__)
    __asm__("" : "+x"(v));
#endif
    return v;
}

inline Floats all(float x) {
    return x - Floats{};
}

inline Floats larger(Floats a, Floats b) {
    return a > b ? a : b;
}

inline float largest(Floats v) {
    FourFloats parts[width / 4];
    memcpy(parts, &v, sizeof(v));
    FourFloats found = parts[0];
    for (int i = 1; i < width / 4; ++i) {
        found = parts[i] > found ? parts[i] : found;
    }
    const auto of_two = [](float a, float b) { return a > b ? a : b; };
    return of_two(of_two(found[0], found[1]), of_two(found[2], found[3]));
}

// The sums of four vectors.
inline FourFloats sums(Floats a, Floats b, Floats c, Floats d) {
#if defined(__AVX512F__)
    const __m512 ab =
        _mm512_add_ps(_mm512_unpacklo_ps((__m512) a, (__m512) b), _mm512_unpackhi_ps((__m512) a, (__m512) b));
    const __m512 cd =
        _mm512_add_ps(_mm512_unpacklo_ps((__m512) c, (__m512) d), _mm512_unpackhi_ps((__m512) c, (__m512) d));
    const __m512 of_lanes = _mm512_add_ps(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xee));
    const __m256 of_pairs = _mm256_add_ps(_mm512_castps512_ps256(of_lanes),
                                          _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(of_lanes), 1)));
    return (FourFloats) _mm_add_ps(_mm256_castps256_ps128(of_pairs), _mm256_extractf128_ps(of_pairs, 1));
#elif defined(__AVX2__)
    const __m256 ab =
        _mm256_add_ps(_mm256_unpacklo_ps((__m256) a, (__m256) b), _mm256_unpackhi_ps((__m256) a, (__m256) b));
    const __m256 cd =
        _mm256_add_ps(_mm256_unpacklo_ps((__m256) c, (__m256) d), _mm256_unpackhi_ps((__m256) c, (__m256) d));
    const __m256 of_lanes = _mm256_add_ps(_mm256_shuffle_ps(ab, cd, 0x44), _mm256_shuffle_ps(ab, cd, 0xee));
    return (FourFloats) _mm_add_ps(_mm256_castps256_ps128(of_lanes), _mm256_extractf128_ps(of_lanes, 1));
#else
    const auto sum = [](Floats v) { return (v[0] + v[2]) + (v[1] + v[3]); };
    return FourFloats{ sum(a), sum(b), sum(c), sum(d) };
#endif
}

// exp(x) for x <= 0 within 2 units in the last place; 0 below -87.
inline Floats exp_of(Floats x) {
    constexpr float log2_e = 1.44269504f, ln2_high = 0.693359375f, ln2_low = -2.12194440e-4f, magic = 12582912.0f;
    const Ints      vanishes = x < all(-87.0f);
    const Floats    shifted  = x * log2_e + magic; // rounds to an integer, which is then in the low bits
    const Floats    n        = shifted - magic;
    const Floats    r        = (x - n * ln2_high) - n * ln2_low;
    Floats          p        = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p                        = p * r + 8.3334519073e-3f;
    p                        = p * r + 4.1665795894e-2f;
    p                        = p * r + 1.6666665459e-1f;
    p                        = p * r + 5.0000001201e-1f;
    p                        = p * (r * r) + r + 1.0f;
    const Ints power         = (Ints) shifted << 23; // the magic number's own low bits are 0
    const Ints bits          = (Ints) p + power;
    return (Floats) (bits & ~vanishes);
}

inline Floats tanh_of(Floats x) {
    const Floats size = larger(x, -x), shrunk = exp_of(size * -2.0f);
    const Floats found = (1.0f - shrunk) / (1.0f + shrunk);
    return x < Floats{} ? -found : found;
}

// Values of a cache. Each type has `load(row, i, scale)`: values i .. i + width - 1 of a row, i a multiple of the
// width. `scale(row, i)` is that of the block of value i, for all its values.

inline Floats from_half(const uint16_t * p) {
#if defined(__AVX512F__)
    return (Floats) _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)));
#elif defined(__AVX2__)
    return (Floats) _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p)));
#elif defined(__ARM_NEON)
    return (Floats) vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p)));
#else
    Floats made = {};
    for (int i = 0; i < width; ++i) {
        // A half's exponent and fraction at a float's place, then times 2^112; infinities and NaN stay.
        const uint32_t bits = p[i], magnitude = (bits & 0x7fff) << 13, sign = (bits & 0x8000) << 16;
        float          value;
        memcpy(&value, &magnitude, 4);
        value *= 5.192296858534828e33f;
        uint32_t scaled;
        memcpy(&scaled, &value, 4);
        scaled = (magnitude >= (0x7c00u << 13) ? (scaled | 0x7f800000u) : scaled) | sign;
        memcpy(&value, &scaled, 4);
        made[i] = value;
    }
    return made;
#endif
}

inline float from_half(uint16_t half) {
#if defined(__AVX2__) || defined(__AVX512F__)
    return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(half)));
#else
    uint16_t some[width] = { half };
    return from_half(some)[0];
#endif
}

inline Floats all_of_half(uint16_t half) {
#if defined(__AVX512F__)
    return (Floats) _mm512_cvtph_ps(_mm256_set1_epi16(int16_t(half)));
#elif defined(__AVX2__)
    return (Floats) _mm256_cvtph_ps(_mm_set1_epi16(int16_t(half)));
#else
    return all(from_half(half));
#endif
}

inline uint16_t half_at(const char * p) {
    uint16_t half;
    memcpy(&half, p, 2);
    return half;
}

inline Floats from_bytes(const int8_t * p) {
#if defined(__AVX512F__)
    return (Floats) _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p))));
#elif defined(__AVX2__)
    return (Floats) _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(p))));
#else
    Floats made = {};
    for (int i = 0; i < width; ++i) {
        made[i] = float(p[i]);
    }
    return made;
#endif
}

// Numbers without a sign. GCC 12 widens them one by one where the compiler is left to it.
inline Ints from_unsigned(const uint8_t * p) {
#if defined(__AVX512F__)
    return (Ints) _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p)));
#elif defined(__AVX2__)
    return (Ints) _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(p)));
#else
    typedef uint8_t Bytes __attribute__((vector_size(width), aligned(1), may_alias));
    return __builtin_convertvector(*reinterpret_cast<const Bytes *>(p), Ints);
#endif
}

inline Ints from_unsigned(const uint16_t * p) {
#if defined(__AVX512F__)
    return (Ints) _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)));
#elif defined(__AVX2__)
    return (Ints) _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p)));
#else
    typedef uint16_t Halves __attribute__((vector_size(2 * width), aligned(2), may_alias));
    return __builtin_convertvector(*reinterpret_cast<const Halves *>(p), Ints);
#endif
}

struct NoScale {};

template <int bytes_of_value> struct Values {
    static constexpr int block = 1, bytes = bytes_of_value;

    static NoScale scale(const char *, int64_t) { return {}; }
};

struct F32 : Values<4> {
    static Floats load(const char * row, int64_t i, NoScale) {
        return ::load(reinterpret_cast<const float *>(row) + i);
    }
};

struct F16 : Values<2> {
    static Floats load(const char * row, int64_t i, NoScale) {
        return from_half(reinterpret_cast<const uint16_t *>(row) + i);
    }
};

struct BF16 : Values<2> {
    static Floats load(const char * row, int64_t i, NoScale) {
        return (Floats) (from_unsigned(reinterpret_cast<const uint16_t *>(row) + i) << 16);
    }
};

// ggml's blocks of 32: a scale as half, then the values.
template <int bytes_of_block> struct Blocks {
    static constexpr int block = 32, bytes = bytes_of_block;

    static const char * values(const char * row, int64_t i) { return row + i / block * bytes + 2; }

    static Floats scale(const char * row, int64_t i) { return all_of_half(half_at(values(row, i) - 2)); }
};

struct Q8_0 : Blocks<34> {
    static Floats load(const char * row, int64_t i, Floats scale) {
        return from_bytes(reinterpret_cast<const int8_t *>(values(row, i)) + i % block) * scale;
    }
};

// Value i lies in the low half of byte i, value i + 16 in the high one; 8 is 0.
struct Q4_0 : Blocks<18> {
    static Floats load(const char * row, int64_t i, Floats scale) {
        const Ints both    = from_unsigned(reinterpret_cast<const uint8_t *>(values(row, i)) + i % 16);
        const Ints numbers = (both >> (i % block < 16 ? 0 : 4) & 15) - 8;
        return __builtin_convertvector(numbers, Floats) * scale;
    }
};

template <class T> inline Floats load_alone(const char * row, int64_t i) {
    return T::load(row, i, T::scale(row, i));
}

// Values that share a scale, or those of a vector where none do.
template <class T> constexpr int values_at_once = T::block > width ? T::block : width;

} // namespace
