// Values by words: V times weights.
#pragma once

#include "words.h"

#if OA_HAS_WORDS

namespace {

constexpr int pairs_at_once = 8;

// Where a pair of 16 tokens' weights lies once they are packed as words.
constexpr int place_of_pair(int pair) {
    return (pair & 1) | (pair >> 1 & 1) << 2 | (pair >> 2 & 1) << 1;
}

// Words of a block of V: for each pair of tokens 4 vectors with a pair of every value. Vectors 0 and 1 have values
// 0 to 7 and 16 to 23, even ones and odd ones; 2 and 3 the others.
template <class V>
void words_of_values(const char * v, size_t stride, int64_t n, int64_t block, int64_t further, __m256i_u * words,
                     uint16_t * halves) {
    const auto row_of = [&](int64_t t) { return v + size_t(t < n ? t : n - 1) * stride + block * V::bytes; };
    for (int64_t t = 0; t < n; t += 16, words += 4 * pairs_at_once) {
#pragma GCC unroll 8
        for (int pair = 0; pair < pairs_at_once; ++pair) {
            alignas(32) char room[2][block_values];
            const int64_t    i     = t + 2 * pair;
            const char *     first = row_of(i), *second = row_of(i + 1);
            prefetch(first + further);
            prefetch(second + further);
            halves[i]        = half_at(first);
            halves[i + 1]    = half_at(second);
            const __m256i a  = load_words(bytes_of_block<V>(first, 0, room[0]));
            const __m256i b  = load_words(bytes_of_block<V>(second, 0, room[1]));
            __m256i_u *   to = words + 4 * place_of_pair(pair);
            to[0]            = _mm256_unpacklo_epi16(even_words(a), even_words(b));
            to[1]            = _mm256_unpacklo_epi16(odd_words(a), odd_words(b));
            to[2]            = _mm256_unpackhi_epi16(even_words(a), even_words(b));
            to[3]            = _mm256_unpackhi_epi16(odd_words(a), odd_words(b));
        }
    }
}

// Scales of a block's values by token. NaN if one of them is no number or infinite, else 1.
float scales_of_values(const uint16_t * halves, float * scales) {
    Floats sum = {};
    for (int64_t t = 0; t < block_tokens; t += width) {
        const Floats some = from_half(halves + t);
        store(scales + t, some);
        sum += larger(some, -some);
    }
    return sums(sum, sum, sum, sum)[0] < __builtin_inff() ? 1.0f : __builtin_nanf("");
}

// Weights of a row times the values' scales, as words: the largest is most_of_word. Returns what a unit is worth.
float take_weights(const float * weights, const float * scales, int16_t * words) {
    Floats products[block_tokens / width], most = {};
#pragma GCC unroll 8
    for (int i = 0; i < block_tokens / width; ++i) {
        products[i] = load(weights + i * width) * load(scales + i * width);
        most        = larger(most, larger(products[i], -products[i]));
    }
    const float unit = largest(most) / most_of_word, times = unit > least_unit ? 1.0f / unit : 0.0f;
#pragma GCC unroll 4
    for (int i = 0; i < block_tokens / width; i += 2) {
        store_words(words + i * width, _mm256_packs_epi32(_mm256_cvtps_epi32((__m256) (products[i] * times)),
                                                          _mm256_cvtps_epi32((__m256) (products[i + 1] * times))));
    }
    return unit;
}

// out[r][i] += units[r] * the sums over pairs of tokens, for values 0 to 7 and 16 to 23. `words`: their two vectors.
template <int n_rows>
void mix_words(const int16_t * weights, const __m256i_u * words, int64_t n_pairs, const float * units, int64_t d,
               float * out) {
    __m256i even[n_rows], odd[n_rows];
#pragma GCC unroll 16
    for (int r = 0; r < n_rows; ++r) {
        even[r] = odd[r] = _mm256_setzero_si256();
    }
    for (int64_t pair = 0; pair < n_pairs; ++pair) {
        const __m256i of_even = words[4 * pair], of_odd = words[4 * pair + 1];
#pragma GCC unroll 16
        for (int r = 0; r < n_rows; ++r) {
            const __m256i weight =
                _mm256_set1_epi32(reinterpret_cast<const IntAnywhere *>(weights + r * block_tokens)[pair]);
            add_products(even[r], of_even, weight);
            add_products(odd[r], of_odd, weight);
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < n_rows; ++r) {
        const __m256i low = _mm256_unpacklo_epi32(even[r], odd[r]), high = _mm256_unpackhi_epi32(even[r], odd[r]);
        const auto    add = [&](float * to, __m256i sum) {
            store(to, load(to) + (Floats) _mm256_cvtepi32_ps(sum) * units[r]);
        };
        add(out + r * d, _mm256_permute2x128_si256(low, high, 0x20));
        add(out + r * d + 16, _mm256_permute2x128_si256(low, high, 0x31));
    }
}

// out[h][r] as mix_by_dots. It writes zeros behind the weights.
template <class V>
void mix_by_words(float * weights, const Heads & heads, const char * v, size_t stride, int64_t n, int64_t d,
                  float * room, float * out) {
    const int64_t n_pairs = (n + 15) / 16 * pairs_at_once;
    auto *        words   = reinterpret_cast<__m256i_u *>(room);
    float *       scales  = room + block_tokens * block_values / 2;
    float *       units   = scales + block_tokens;
    auto *        packed  = reinterpret_cast<int16_t *>(units + (heads.n_rows + 15) / 16 * 16);
    for (int64_t h = 0; h < heads.n; ++h) {
        const char * rows    = v + size_t(h) * heads.stride;
        float *      of_head = weights + h * heads.rows_between * block_tokens;
        const char * next    = h + 1 < heads.n ? rows + heads.stride : v + size_t(block_tokens) * stride;
        for (int64_t r = 0; r < heads.n_rows; ++r) {
            memset(of_head + r * block_tokens + n, 0, size_t(block_tokens - n) * sizeof(float));
        }
        for (int64_t block = 0; block < d / block_values; ++block) {
            uint16_t halves[block_tokens] = {};
            words_of_values<V>(rows, stride, n, block, next - rows, words, halves);
            const float odd = scales_of_values(halves, scales);
            for (int64_t r = 0; r < heads.n_rows; ++r) {
                units[r] = take_weights(of_head + r * block_tokens, scales, packed + r * block_tokens) * odd;
            }
            float * to = out + h * heads.rows_between * d + block * block_values;
            in_tiles(heads.n_rows, [&](auto tile, int64_t r) {
                for (int half = 0; half < 2; ++half) {
                    mix_words<decltype(tile)::n>(packed + r * block_tokens, words + 2 * half, n_pairs, units + r, d,
                                                 to + r * d + 8 * half);
                }
            });
        }
    }
}

} // namespace

#endif
