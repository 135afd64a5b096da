// Scores by words: query rows against K.
#pragma once

#include "words.h"

#if OA_HAS_WORDS

namespace {

// Writes a query row's words over its floats, and their scale behind them. Of four values, the first and third are a
// pair, and the second and fourth.
void take_words(float * row, int64_t d) {
    Floats most = {}, sum = {};
    for (int64_t i = 0; i < d; i += width) {
        const Floats values = load(row + i), size = larger(values, -values);
        most = larger(most, size);
        sum += size;
    }
    const float largest_of_row = largest(most);
    const float scale = largest_of_row / most_of_word, times = scale > least_unit ? 1.0f / scale : 0.0f;
    const bool  finite = sums(sum, sum, sum, sum)[0] < __builtin_inff();
    auto *      to     = reinterpret_cast<__m128i *>(row);
    for (int64_t i = 0; i < d; i += width) {
        const __m256i numbers = _mm256_cvtps_epi32((__m256) (load(row + i) * times));
        const __m256i words =
            _mm256_shufflelo_epi16(_mm256_shufflehi_epi16(_mm256_packs_epi32(numbers, numbers), 0xd8), 0xd8);
        _mm_storeu_si128(to++, _mm_unpacklo_epi64(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
    }
    row[d / 2] = finite ? scale : __builtin_nanf("");
}

// Words of 8 keys, of a block: 16 vectors, each with a pair of every key.
template <class K> void words_of_keys(const char * const * rows, int64_t block, __m256i_u * words) {
    alignas(32) char room[keys_at_once][block_values];
    const char *     bytes[keys_at_once];
    for (int t = 0; t < keys_at_once; ++t) {
        bytes[t] = bytes_of_block<K>(rows[t], block, room[t]);
    }
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
        const auto of_two = [&](int t) { // a key and the fourth behind it
            return _mm256_inserti128_si256(
                _mm256_castsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i *>(bytes[t] + 16 * half))),
                _mm_loadu_si128(reinterpret_cast<const __m128i *>(bytes[t + 4] + 16 * half)), 1);
        };
        const __m256i a = of_two(0), b = of_two(1), c = of_two(2), d = of_two(3);
        const __m256i ab = _mm256_unpacklo_epi32(a, b), cd = _mm256_unpacklo_epi32(c, d);
        const __m256i ab_high = _mm256_unpackhi_epi32(a, b), cd_high = _mm256_unpackhi_epi32(c, d);
        const __m256i fours[4] = { _mm256_unpacklo_epi64(ab, cd), _mm256_unpackhi_epi64(ab, cd),
                                   _mm256_unpacklo_epi64(ab_high, cd_high), _mm256_unpackhi_epi64(ab_high, cd_high) };
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
            words[8 * half + 2 * i]     = even_words(fours[i]);
            words[8 * half + 2 * i + 1] = odd_words(fours[i]);
        }
    }
}

// scores[r][t] of n_rows rows with 8 keys.
template <int n_rows>
void scores_of_words(const float * q, int64_t d, const __m256i_u * words, const float * scales, float * scores) {
    Floats sum[n_rows] = {};
    for (int64_t block = 0; block < d / block_values; ++block) {
        __m256i of_block[n_rows];
#pragma GCC unroll 16
        for (int r = 0; r < n_rows; ++r) {
            of_block[r] = _mm256_setzero_si256();
        }
#pragma GCC unroll 4
        for (int i = 0; i < pairs_of_block; ++i) {
            const __m256i keys = words[block * pairs_of_block + i];
#pragma GCC unroll 16
            for (int r = 0; r < n_rows; ++r) {
                const auto * pairs = reinterpret_cast<const IntAnywhere *>(q + r * d);
                add_products(of_block[r], keys, _mm256_set1_epi32(pairs[block * pairs_of_block + i]));
            }
        }
#pragma GCC unroll 16
        for (int r = 0; r < n_rows; ++r) {
            sum[r] += (Floats) _mm256_cvtepi32_ps(of_block[r]) * load(scales + block * keys_at_once);
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < n_rows; ++r) {
        store(scores + r * block_tokens, sum[r] * q[r * d + d / 2]);
    }
}

// scores[h][r][t] as scores_by_dots, of queries that take_words made.
template <class K>
void scores_by_words(const float * q, const Heads & heads, int64_t d, const char * k, size_t stride, int64_t n,
                     float * room, float * scores) {
    const int64_t n_blocks = d / block_values;
    auto *        words    = reinterpret_cast<__m256i_u *>(room);
    float *       scales   = room + keys_at_once * d / 2;
    auto *        halves   = reinterpret_cast<uint16_t *>(scales + n_blocks * keys_at_once);
    for (int64_t t = 0; t < n; t += keys_at_once) {
        for (int64_t h = 0; h < heads.n; ++h) {
            const char * rows[keys_at_once];
            for (int64_t i = 0; i < keys_at_once; ++i) {
                rows[i] = k + size_t(t + i < n ? t + i : n - 1) * stride + size_t(h) * heads.stride;
            }
            for (int64_t block = 0; block < n_blocks; ++block) {
#pragma GCC unroll 8
                for (int i = 0; i < keys_at_once; ++i) {
                    halves[block * keys_at_once + i] = half_at(rows[i] + block * K::bytes);
                    prefetch(rows[i] + ahead * stride + block * K::bytes);
                }
                words_of_keys<K>(rows, block, words + block * pairs_of_block);
            }
            for (int64_t i = 0; i < n_blocks * keys_at_once; i += width) {
                const Floats some = from_half(halves + i);
                store(scales + i, some + (some - some)); // an infinite one makes no number: it must show
            }
            const float * of_head = q + h * heads.rows_between * d;
            float *       to      = scores + h * heads.rows_between * block_tokens + t;
            in_tiles(heads.n_rows, [&](auto tile, int64_t r) {
                scores_of_words<decltype(tile)::n>(of_head + r * d, d, words, scales, to + r * block_tokens);
            });
        }
    }
}

} // namespace

#endif
