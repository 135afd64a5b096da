#include "thin_task.h"
#include "thin_weights.h"

#include <algorithm>
#include <iterator>

namespace {

using namespace oa::decode;

template <class Type> using Column = typename Type::Column;

template <class Type> void quantise(const float * column, int64_t first, int64_t n, char * to) {
    auto * const groups = reinterpret_cast<Column<Type> *>(to);
    for (int64_t i = first; i < first + n; ++i) {
        Type::quantise(column + i * Type::values, groups[i]);
    }
}

// N rows with C columns at once. Each result is summed alone, in one order. ahead: bytes to rows that come next. The
// processor's own prefetching stops at the end of a page, and follows one stream in a page.
template <class Type, int N, int C>
void together(const char * rows, size_t row_stride, size_t ahead, int64_t n_groups, const char * columns, char * out,
              size_t out_stride) {
    const auto * const groups = reinterpret_cast<const Column<Type> *>(columns);
    typename Type::Sum sums[N][C];
    for (int64_t i = 0; i < n_groups; ++i) {
#pragma GCC unroll 4
        for (int r = 0; r < N; ++r) {
            const char * const at = rows + size_t(r) * row_stride + size_t(i) * Type::bytes;
            for (int line = 0; line < Type::bytes; line += 64) {
                _mm_prefetch(at + ahead + line, _MM_HINT_T0);
            }
            const typename Type::Weight weight(at);
#pragma GCC unroll 4
            for (int c = 0; c < C; ++c) {
                sums[r][c].add(weight, groups[c * n_groups + i]);
            }
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
    constexpr int at_once = C == 1 ? 4 : 2;
    int64_t       row     = first;
    for (; row + at_once <= end; row += at_once) {
        const size_t ahead = row + 2 * at_once <= end ? at_once * row_stride : 0;
        together<Type, at_once, C>(weight + size_t(row) * row_stride, row_stride, ahead, n_groups, columns,
                                   out + size_t(row) * sizeof(float), out_stride);
    }
    for (; row < end; ++row) {
        together<Type, 1, C>(weight + size_t(row) * row_stride, row_stride, 0, n_groups, columns,
                             out + size_t(row) * sizeof(float), out_stride);
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

} // namespace

const oa::decode::Kernels oa::decode::avx512_kernels = {
    "avx512", { kernel<Q4_0>(), kernel<Q8_0>(), kernel<Q4_K>(), kernel<Q6_K>() }
};
