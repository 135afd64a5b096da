// Few query rows: a block of K and V is read straight from the cache, each of its rows against all query rows that
// share it (kernels.h).
#pragma once

#include "cache_rows.h"
#include "task.h"
#include "vectors.h"

namespace {

using namespace oa::attend;

constexpr int row_tile = 6;

// Tokens whose values are added to a head before the next head's; chosen by trial, on CPUs with AVX-512 and with AVX2.
constexpr int mixed_tokens = registers >= 32 ? 32 : 8;

// Vectors of K or V that are widened at once: with as many sums for each row, all stay in registers.
constexpr int at_once(int n_rows) {
    return registers >= 32 || n_rows <= 2 ? 4 : 2;
}

template <int rows> struct Tile { static constexpr int n = rows; };

// f(Tile<left>(), r), where `left` is n or less.
template <int n, class F> void last_tile(int64_t left, int64_t r, const F & f) {
    if constexpr (n > 0) {
        if (left == n) {
            f(Tile<n>(), r);
        } else {
            last_tile<n - 1>(left, r, f);
        }
    }
}

// f(Tile<n>(), r) for all rows, n of them from r on at a time.
template <class F> void in_tiles(int64_t n_rows, const F & f) {
    int64_t r = 0;
    for (; r + row_tile <= n_rows; r += row_tile) {
        f(Tile<row_tile>(), r);
    }
    last_tile<row_tile - 1>(n_rows - r, r, f);
}

// scores[r][t] of n_rows rows with n_tokens. What lies `further` bytes behind each token is fetched ahead, line by line
// between the products: many fetches in a row would hold them up.
template <class K, int n_rows, int n_tokens>
void scores_of_tile(const float * q, int64_t d, const char * const * k, int64_t further, float * scores) {
    Floats sum[n_rows][n_tokens] = {};
    for (int64_t begin = 0; begin < d; begin += values_at_once<K>) {
        decltype(K::scale(k[0], 0)) scale[n_tokens];
#pragma GCC unroll 16
        for (int t = 0; t < n_tokens; ++t) {
            scale[t] = K::scale(k[t], begin);
            prefetch(k[t] + further + bytes_of<K>(begin));
        }
#pragma GCC unroll 16
        for (int64_t i = begin; i < begin + values_at_once<K>; i += width) {
            Floats values[n_tokens];
#pragma GCC unroll 16
            for (int t = 0; t < n_tokens; ++t) {
                values[t] = K::load(k[t], i, scale[t]);
            }
#pragma GCC unroll 16
            for (int r = 0; r < n_rows; ++r) {
                const Floats query = in_register(load(q + r * d + i));
#pragma GCC unroll 16
                for (int t = 0; t < n_tokens; ++t) {
                    sum[r][t] += query * values[t];
                }
            }
        }
    }
    const auto at = [&](int i) { return i < n_rows * n_tokens ? sum[i / n_tokens][i % n_tokens] : Floats{}; };
#pragma GCC unroll 16
    for (int i = 0; i < n_rows * n_tokens; i += 4) {
        const FourFloats four = sums(at(i), at(i + 1), at(i + 2), at(i + 3));
        float            found[4];
        memcpy(found, &four, sizeof(found));
        for (int j = 0; j < 4 && i + j < n_rows * n_tokens; j += n_tokens) {
            memcpy(scores + (i + j) / n_tokens * block_tokens, found + j, n_tokens * sizeof(float));
        }
    }
}

// The same with 4 tokens.
template <class K, int n_rows>
void scores_of_rows(const float * q, int64_t d, const char * const * k, int64_t further, float * scores) {
    constexpr int n_tokens = at_once(n_rows);
    for (int t = 0; t < 4; t += n_tokens) {
        scores_of_tile<K, n_rows, n_tokens>(q, d, k + t, further, scores + t);
    }
}

// The heads that are computed together: how many, the query rows of each in memory and those that are computed, and the
// bytes from one head to the next in the cache.
struct Heads {
    int64_t n, rows_between, n_rows;
    size_t  stride;
};

// scores[h][r][t] of all query rows with n tokens. Token by token, all heads: the cache is read as it lies in memory.
template <class K>
void scores_by_dots(const float * q, const Heads & heads, int64_t d, const char * k, size_t stride, int64_t n, float *,
                    float * scores) {
    for (int64_t t = 0; t < n; t += 4) {
        for (int64_t h = 0; h < heads.n; ++h) {
            const char * rows[4];
            for (int64_t i = 0; i < 4; ++i) {
                rows[i] = k + size_t(t + i < n ? t + i : n - 1) * stride + size_t(h) * heads.stride;
            }
            const float * of_head = q + h * heads.rows_between * d;
            float *       to      = scores + h * heads.rows_between * block_tokens + t;
            in_tiles(heads.n_rows, [&](auto tile, int64_t r) {
                const int64_t further = r == 0 ? int64_t(ahead * stride) : 0; // the other rows need no more
                scores_of_rows<K, decltype(tile)::n>(of_head + r * d, d, rows, further, to + r * block_tokens);
            });
        }
    }
}

// out[r][i] += sum over t of weights[r][t] * v[t][i], from value `from` on. Fetches ahead as above.
template <class V, int n_rows, int n_vectors>
void mix_rows(const float * weights, const char * v, size_t stride, int64_t n, int64_t d, int64_t from, int64_t further,
              float * out) {
    Floats sum[n_rows][n_vectors];
#pragma GCC unroll 16
    for (int r = 0; r < n_rows; ++r) {
#pragma GCC unroll 16
        for (int c = 0; c < n_vectors; ++c) {
            sum[r][c] = load(out + r * d + from + c * width);
        }
    }
    for (int64_t t = 0; t < n; ++t) {
        const char *               row = v + size_t(t) * stride;
        decltype(V::scale(row, 0)) scale;
        Floats                     values[n_vectors];
#pragma GCC unroll 16
        for (int c = 0; c < n_vectors; ++c) {
            const int64_t i = from + c * width;
            if (c * width % values_at_once<V> == 0) {
                scale = V::scale(row, i);
            }
            values[c] = V::load(row, i, scale);
            if (c * width % values_of_a_line<V>() == 0) {
                prefetch(row + further + bytes_of<V>(i));
            }
        }
#pragma GCC unroll 16
        for (int r = 0; r < n_rows; ++r) {
            const Floats weight = all(weights[r * block_tokens + t]);
#pragma GCC unroll 16
            for (int c = 0; c < n_vectors; ++c) {
                sum[r][c] += weight * values[c];
            }
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < n_rows; ++r) {
#pragma GCC unroll 16
        for (int c = 0; c < n_vectors; ++c) {
            store(out + r * d + from + c * width, sum[r][c]);
        }
    }
}

template <class V, int n_rows>
void mix_widths(const float * weights, const char * v, size_t stride, int64_t n, int64_t d, int64_t further,
                float * out) {
    constexpr int n_vectors = at_once(n_rows);
    int64_t       from      = 0;
    for (; from + n_vectors * width <= d; from += n_vectors * width) {
        mix_rows<V, n_rows, n_vectors>(weights, v, stride, n, d, from, further, out);
    }
    for (; from < d; from += width) {
        mix_rows<V, n_rows, 1>(weights, v, stride, n, d, from, further, out);
    }
}

// out[h][r] += sum over t of weights[h][r][t] * v[t][h], some tokens at a time for all heads.
template <class V>
void mix_by_dots(float * weights, const Heads & heads, const char * v, size_t stride, int64_t n, int64_t d, float *,
                 float * out) {
    for (int64_t t = 0; t < n; t += mixed_tokens) {
        const int64_t some = n - t < mixed_tokens ? n - t : mixed_tokens;
        for (int64_t h = 0; h < heads.n; ++h) {
            const char *  rows    = v + size_t(t) * stride + size_t(h) * heads.stride;
            const float * of_head = weights + h * heads.rows_between * block_tokens + t;
            float *       to      = out + h * heads.rows_between * d;
            const char *  next    = h + 1 < heads.n ? rows + heads.stride : v + size_t(t + mixed_tokens) * stride;
            in_tiles(heads.n_rows, [&](auto tile, int64_t r) {
                const int64_t further = r == 0 ? next - rows : 0;
                mix_widths<V, decltype(tile)::n>(of_head + r * block_tokens, rows, stride, some, d, further,
                                                 to + r * d);
            });
        }
    }
}

} // namespace
