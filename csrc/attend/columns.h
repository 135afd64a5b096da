// Many query rows: a block of K and V is widened to f32 once for all rows of a tile, which lie as columns. Products are
// of the block's single values with vectors of columns (kernels.h).
#pragma once

#include "cache_rows.h"
#include "task.h"
#include "vectors.h"

namespace {

using namespace oa::attend;

constexpr int column_tile = registers >= 32 ? 4 : 2; // vectors of query rows
constexpr int sums_kept   = registers >= 32 ? 24 : 12;

template <class T> void widen(const char * rows, size_t stride, int64_t n, int64_t d, float * out) {
    for (int64_t t = 0; t < n; ++t) {
        const char * row = rows + size_t(t) * stride;
        prefetch(row + ahead * stride, bytes_of<T>(d));
        for (int64_t begin = 0; begin < d; begin += values_at_once<T>) {
            const auto scale = T::scale(row, begin);
            for (int64_t i = begin; i < begin + values_at_once<T>; i += width) {
                store(out + t * d + i, T::load(row, i, scale));
            }
        }
    }
}

// Rows of a multiple of the width, `stride` floats from each other.
struct Matrix {
    float * at;
    int64_t stride;
};

// out[t][.] += sum over i of single[t * of_t + i * of_i] * columns[i][.], n_out values t at once: a tile of out rows
// by vectors of columns.
template <int n_out, int n_vectors>
void products_tile(const float * single, int64_t of_t, int64_t of_i, const Matrix & columns, int64_t n,
                   const Matrix & out) {
    Floats sum[n_out][n_vectors];
#pragma GCC unroll 16
    for (int t = 0; t < n_out; ++t) {
#pragma GCC unroll 16
        for (int c = 0; c < n_vectors; ++c) {
            sum[t][c] = load(out.at + t * out.stride + c * width);
        }
    }
    for (int64_t i = 0; i < n; ++i) {
        Floats values[n_vectors];
#pragma GCC unroll 16
        for (int c = 0; c < n_vectors; ++c) {
            values[c] = load(columns.at + i * columns.stride + c * width);
        }
#pragma GCC unroll 16
        for (int t = 0; t < n_out; ++t) {
            const Floats one = all(single[t * of_t + i * of_i]);
#pragma GCC unroll 16
            for (int c = 0; c < n_vectors; ++c) {
                sum[t][c] += one * values[c];
            }
        }
    }
#pragma GCC unroll 16
    for (int t = 0; t < n_out; ++t) {
#pragma GCC unroll 16
        for (int c = 0; c < n_vectors; ++c) {
            store(out.at + t * out.stride + c * width, sum[t][c]);
        }
    }
}

template <int n_vectors>
void products(const float * single, int64_t of_t, int64_t of_i, const Matrix & columns, int64_t n_out, int64_t n,
              const Matrix & out) {
    const auto    from      = [&](int64_t t) { return Matrix{ out.at + t * out.stride, out.stride }; };
    constexpr int n_at_once = sums_kept / n_vectors < 12 ? sums_kept / n_vectors : 12;
    int64_t       t         = 0;
    for (; t + n_at_once <= n_out; t += n_at_once) {
        products_tile<n_at_once, n_vectors>(single + t * of_t, of_t, of_i, columns, n, from(t));
    }
    for (; t + 4 <= n_out; t += 4) {
        products_tile<4, n_vectors>(single + t * of_t, of_t, of_i, columns, n, from(t));
    }
    for (; t + 2 <= n_out; t += 2) {
        products_tile<2, n_vectors>(single + t * of_t, of_t, of_i, columns, n, from(t));
    }
    for (; t < n_out; ++t) {
        products_tile<1, n_vectors>(single + t * of_t, of_t, of_i, columns, n, from(t));
    }
}

// All columns up to n_columns, a multiple of the width.
void all_products(const float * single, int64_t of_t, int64_t of_i, const Matrix & columns, int64_t n_columns,
                  int64_t n_out, int64_t n, const Matrix & out) {
    const auto from = [](const Matrix & matrix, int64_t c) { return Matrix{ matrix.at + c, matrix.stride }; };
    int64_t    c    = 0;
    for (; c + column_tile * width <= n_columns; c += column_tile * width) {
        products<column_tile>(single, of_t, of_i, from(columns, c), n_out, n, from(out, c));
    }
    for (; c + 2 * width <= n_columns; c += 2 * width) {
        products<2>(single, of_t, of_i, from(columns, c), n_out, n, from(out, c));
    }
    for (; c < n_columns; c += width) {
        products<1>(single, of_t, of_i, from(columns, c), n_out, n, from(out, c));
    }
}

} // namespace
