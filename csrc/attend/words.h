// Query rows against a cache of bytes (q8_0, q4_0), by products of whole numbers. A vector holds twice as many words of
// 16 bits as floats, and bytes become words in fewer steps than floats. The bytes of the cache are taken as they are. A
// query row is rounded to 15 bits and a sign, and so are a row's weights times the scales of V. Sums over a block's
// values, and over its tokens, are exact. The kernels are made for vectors of 32 bytes. With AVX-512, rows are computed
// by dots: words were not measured there.
#pragma once

#include "dots.h"
#include "room_for_words.h"

#if defined(__AVX2__) && !defined(__AVX512F__)
#define OA_HAS_WORDS 1
#else
#define OA_HAS_WORDS 0
#endif

namespace {

constexpr bool has_words = OA_HAS_WORDS;

} // namespace

#if OA_HAS_WORDS

namespace {

constexpr int   pairs_of_block = block_values / 2;
constexpr float most_of_word   = 32767.0f;
constexpr float least_unit     = 1e-38f; // what one divided by it is no infinity

typedef int32_t IntAnywhere __attribute__((may_alias));

inline __m256i load_words(const void * p) {
    return _mm256_loadu_si256(static_cast<const __m256i *>(p));
}

inline void store_words(void * p, __m256i words) {
    _mm256_storeu_si256(static_cast<__m256i *>(p), words);
}

// Adds the products of pairs of words. The sum is written here because GCC would compute all products before the sums,
// and run out of registers.
inline void add_products(__m256i & sum, __m256i a, __m256i b) {
    const __m256i products = _mm256_madd_epi16(a, b);
    __asm__ volatile("vpaddd %1, %0, %0" : "+x"(sum) : "x"(products));
}

// Words of a vector's bytes at even places and at odd ones.
inline __m256i even_words(__m256i bytes) {
    return _mm256_srai_epi16(_mm256_slli_epi16(bytes, 8), 8);
}

inline __m256i odd_words(__m256i bytes) {
    return _mm256_srai_epi16(bytes, 8);
}

// The 32 values of block i of a row, as bytes: where they lie, or made in `room`.
template <class T> const char * bytes_of_block(const char * row, int64_t i, char * room);

template <> inline const char * bytes_of_block<Q8_0>(const char * row, int64_t i, char *) {
    return Q8_0::values(row, i * block_values);
}

template <> inline const char * bytes_of_block<Q4_0>(const char * row, int64_t i, char * room) {
    const __m128i both = _mm_loadu_si128(reinterpret_cast<const __m128i *>(Q4_0::values(row, i * block_values)));
    const __m256i parts =
        _mm256_srlv_epi32(_mm256_broadcastsi128_si256(both), _mm256_setr_epi32(0, 0, 0, 0, 4, 4, 4, 4));
    store_words(room, _mm256_sub_epi8(_mm256_and_si256(parts, _mm256_set1_epi8(15)), _mm256_set1_epi8(8)));
    return room;
}

} // namespace

#endif
