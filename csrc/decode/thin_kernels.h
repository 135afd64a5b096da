// The kernels of one instruction set. Included once for each, behind the weights of that set (weights_avx512.h,
// weights_avx2.h): types with `block_values`, `block_bytes` and `quantise`, and `Lanes`, `ColumnGroup`, `add`, `total`
// and `rows_at_once`.
#pragma once

#include "thin_task.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <type_traits>

namespace {

using namespace oa::decode;

template <class Type> constexpr int group_bytes = group_values / Type::block_values * Type::block_bytes;

template <class Type> void quantise(const float * values, int64_t n, char * to) {
    auto & group = *reinterpret_cast<ColumnGroup *>(to);
    if (n == group_values) {
        Type::quantise(values, group);
        return;
    }
    float whole[group_values] = {};
    std::copy_n(values, n, whole);
    Type::quantise(whole, group);
}

// How far in front of the rows the next ones are fetched. A processor's own prefetching stops at the end of a page.
// They are fetched into the second cache, which was faster than into the first (docs/decode.md).
constexpr int64_t ahead_bytes = 8192;

constexpr int64_t sum_groups  = 16;    // results are summed by blocks of groups, one after the other
constexpr int64_t pass_groups = 64;    // of all columns at once: they stay in the first cache while rows pass
constexpr int64_t panel_bytes = 65536; // of rows: they stay in the second cache while columns pass

struct Matrix {
    const char * rows;
    size_t       row_stride;
    int64_t      n_groups; // of a row
    size_t       n_last;   // bytes of a row's last group
    int64_t      whole;    // of rows below it the last group is read whole, with bytes of the next row
};

// Rows first .. end - 1 of it, of them groups from .. to - 1.
struct Part {
    const Matrix & matrix;
    int64_t        first, end, from, to;
    const Column * columns;
    int64_t        ahead, fetched; // meanwhile rows are fetched, so many ahead, below row `fetched`;
    const char *   then;           // behind them these, or null

    OA_INLINE const char * next(int64_t row, int64_t n) const {
        if (row + ahead + n <= fetched) {
            return matrix.rows + size_t(row + ahead) * matrix.row_stride;
        }
        return then && row + ahead >= fetched ? then + size_t(row + ahead - fetched) * matrix.row_stride : nullptr;
    }
};

// Some groups of N rows with those of C columns. Each result is summed alone, in one order. `n_last`: bytes of the last
// group, if no more can be read.
template <class Type, int N, int C>
OA_INLINE void together(const char * rows, const char * next, size_t row_stride, int64_t n_groups, size_t n_last,
                        const ColumnGroup * const (&columns)[C], int64_t first, float (&sums)[N][C]) {
    constexpr int bytes       = group_bytes<Type>;
    Lanes         lanes[N][C] = {};
    for (int64_t i = 0; i < n_groups; ++i) {
        const char * at[N];
        char         last[N][bytes];
#pragma GCC unroll 4
        for (int r = 0; r < N; ++r) {
            const size_t offset = size_t(r) * row_stride + size_t(i) * bytes;
            if (next) {
                for (int line = 0; line < bytes; line += 64) {
                    _mm_prefetch(next + offset + line, _MM_HINT_T1);
                }
            }
            at[r] = rows + offset;
            if (n_last && i == n_groups - 1) {
                memset(last[r], 0, bytes);
                at[r] = static_cast<const char *>(memcpy(last[r], at[r], n_last));
            }
        }
        add<Type>(lanes, at, columns, first + i);
    }
#pragma GCC unroll 4
    for (int r = 0; r < N; ++r) {
#pragma GCC unroll 4
        for (int c = 0; c < C; ++c) {
            sums[r][c] += total(lanes[r][c]);
        }
    }
}

template <class Type, int N, int C> void rows_at(const Part & p, int64_t row) {
    const Matrix &      m      = p.matrix;
    const char * const  at     = m.rows + size_t(row) * m.row_stride;
    const char * const  next   = p.next(row, N);
    const size_t        n_last = row + N <= m.whole ? 0 : m.n_last;
    const ColumnGroup * columns[C];
    float               sums[N][C];
    for (int c = 0; c < C; ++c) {
        columns[c] = reinterpret_cast<const ColumnGroup *>(p.columns[c].groups);
        for (int r = 0; r < N; ++r) {
            sums[r][c] = p.from ? p.columns[c].out[row + r] : 0.0f;
        }
    }
    for (int64_t i = p.from; i < p.to; i += sum_groups) {
        const int64_t n      = std::min(sum_groups, p.to - i);
        const size_t  offset = size_t(i) * group_bytes<Type>;
        together<Type, N, C>(at + offset, next ? next + offset : nullptr, m.row_stride, n,
                             i + n == m.n_groups ? n_last : 0, columns, i, sums);
    }
    for (int c = 0; c < C; ++c) {
        for (int r = 0; r < N; ++r) {
            p.columns[c].out[row + r] = sums[r][c];
        }
    }
}

template <class Type, int C> void pass(const Part & p) {
    // One row at a time reads memory as one stream. With several columns rows share what is read of the columns.
    constexpr int at_once = C == 1 ? 1 : rows_at_once;
    int64_t       row     = p.first;
    for (; row + at_once <= p.end; row += at_once) {
        rows_at<Type, at_once, C>(p, row);
    }
    for (; row < p.end; ++row) {
        rows_at<Type, 1, C>(p, row);
    }
}

template <class Type>
void multiply(const char * rows, size_t row_stride, int64_t n_rows, int64_t n_values, const Column * columns,
              int64_t n_columns, const char * then) {
    constexpr decltype(&pass<Type, 1>) by_number[] = { pass<Type, 1>, pass<Type, 2>, pass<Type, 3>, pass<Type, 4> };
    constexpr int64_t                  most = std::size(by_number), bytes = group_bytes<Type>;
    const int64_t all = groups_of(n_values), row_bytes = n_values / Type::block_values * Type::block_bytes;
    // Behind its last values a column has zeros. So bytes of the next row do no harm there, where it comes at once.
    const int64_t over   = (all * bytes + row_bytes - 1) / row_bytes - 1; // rows that are read behind one
    const int64_t whole  = row_stride == size_t(row_bytes) ? n_rows - over : 0;
    const Matrix  matrix = { rows, row_stride, all, size_t(row_bytes % bytes), whole };

    const int64_t n_passes = (n_columns + most - 1) / most, at_once = (n_columns + n_passes - 1) / n_passes;
    const int64_t step = pass_groups / at_once / sum_groups * sum_groups;
    for (int64_t from = 0; from < all; from += step) {
        const int64_t      to = std::min(from + step, all), part_bytes = (to - from) * bytes;
        const int64_t      panel  = n_passes == 1 ? n_rows : (panel_bytes / part_bytes / 4 + 1) * 4;
        const int64_t      ahead  = (ahead_bytes / (rows_at_once * part_bytes) + 1) * rows_at_once;
        const char * const behind = step < all ? nullptr : then;
        for (int64_t row = 0; row < n_rows; row += panel) {
            const int64_t end = std::min(row + panel, n_rows);
            for (int64_t i = 0; i < n_passes; ++i) {
                const int64_t c = n_columns * i / n_passes, n = n_columns * (i + 1) / n_passes - c;
                const bool    fetches = i == 0; // for all passes
                by_number[n - 1]({ matrix, row, end, from, to, columns + c, ahead, fetches ? n_rows : 0,
                                   fetches ? behind : nullptr });
            }
        }
    }
}

template <class Type> constexpr Kernel kernel() {
    return { Type::block_values, quantise<Type>, multiply<Type> };
}

constexpr Kernels kernels_named(const char * name) {
    return { name,
             sizeof(ColumnGroup),
             { kernel<Q4_0>(), kernel<Q8_0>(), kernel<MXFP4>(), kernel<Q4_K>(), kernel<Q6_K>() } };
}

} // namespace
