// The kernels of one instruction set. Included once for each, behind the weights of that set (weights_avx512.h,
// weights_avx2.h): types with `values`, `bytes`, `Column`, `Sum` and `quantise`, `add`, and `rows_at_once`.
#pragma once

#include "thin_task.h"

#include <algorithm>
#include <iterator>
#include <type_traits>

namespace {

using namespace oa::decode;

template <class Type> using Column = typename Type::Column;

template <class Type> void quantise(const float * column, int64_t first, int64_t n, char * to) {
    auto * const groups = reinterpret_cast<Column<Type> *>(to);
    for (int64_t i = first; i < first + n; ++i) {
        Type::quantise(column + i * Type::values, groups[i]);
    }
}

// How far in front of the rows the next ones are fetched. A processor's own prefetching stops at the end of a page.
// They are fetched into the second cache, which was faster than into the first (docs/decode.md).
constexpr size_t ahead_bytes = 8192;

// N rows with C columns at once. Each result is summed alone, in one order.
template <class Type, int N, int C>
void together(const char * rows, size_t row_stride, size_t ahead, int64_t n_groups, const char * columns, char * out,
              size_t out_stride) {
    const auto * const groups = reinterpret_cast<const Column<Type> *>(columns);
    typename Type::Sum sums[N][C];
    for (int64_t i = 0; i < n_groups; ++i) {
        // Rows lie one behind the other: each group fetches its part of the bytes that come `ahead` of all N.
        const char * const next = rows + ahead + size_t(i) * N * Type::bytes;
        for (int line = 0; line < N * Type::bytes; line += 64) {
            _mm_prefetch(next + line, _MM_HINT_T1);
        }
#pragma GCC unroll 4
        for (int r = 0; r < N; ++r) {
            add<Type>(sums[r], rows + size_t(r) * row_stride + size_t(i) * Type::bytes, groups + i, n_groups);
        }
    }
    for (int c = 0; c < C; ++c) {
        for (int r = 0; r < N; ++r) {
            reinterpret_cast<float *>(out + size_t(c) * out_stride)[r] = sums[r][c].total();
        }
    }
}

template <class Type, int C>
void multiply(const char * weight, size_t row_stride, int64_t first, int64_t end, int64_t n_groups,
              const char * columns, char * out, size_t out_stride) {
    // One row at a time reads memory as one stream. With several columns rows share what is read of the columns.
    constexpr int at_once = C == 1 ? 1 : rows_at_once;
    const auto    take    = [&](auto tile, int64_t row) {
        constexpr int      n  = decltype(tile)::value;
        const char * const at = weight + size_t(row) * row_stride;
        // Behind the last row another thread reads.
        const size_t ahead = std::min(ahead_bytes, size_t(end - row - n) * row_stride);
        together<Type, n, C>(at, row_stride, ahead, n_groups, columns, out + size_t(row) * sizeof(float), out_stride);
    };
    int64_t row = first;
    for (; row + at_once <= end; row += at_once) {
        take(std::integral_constant<int, at_once>(), row);
    }
    for (; row < end; ++row) {
        take(std::integral_constant<int, 1>(), row);
    }
}

template <class Type>
void multiply_any(const char * weight, size_t row_stride, int64_t first, int64_t end, int64_t n_groups,
                  const char * columns, int n_columns, char * out, size_t out_stride) {
    constexpr decltype(&multiply<Type, 1>) by_number[] = { multiply<Type, 1>, multiply<Type, 2>, multiply<Type, 3>,
                                                           multiply<Type, 4> };
    static_assert(std::size(by_number) == most_together);
    by_number[n_columns - 1](weight, row_stride, first, end, n_groups, columns, out, out_stride);
}

template <class Type> constexpr Kernel kernel() {
    return { Type::values, sizeof(Column<Type>), quantise<Type>, multiply_any<Type> };
}

constexpr Kernels kernels_named(const char * name) {
    return { name, { kernel<Q4_0>(), kernel<Q8_0>(), kernel<MXFP4>(), kernel<Q4_K>(), kernel<Q6_K>() } };
}

} // namespace
