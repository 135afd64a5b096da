// One product of a quantised matrix with few columns as our kernels see it. Plain data: files compiled for other
// instruction sets share it.
#pragma once

#include <cstddef>
#include <cstdint>

namespace oa::decode {

enum class WeightType : int { q4_0, q8_0, mxfp4, q4_k, q6_k };

constexpr int n_weight_types = 5;
constexpr int most_together  = 4; // columns that are multiplied with a row at once

// A type's values are looked at in groups. A column's groups are bytes and scales in the order in which they are read.
struct Kernel {
    int64_t group_values, group_bytes; // of a column
    // Groups first .. first + n - 1 of a column.
    void (*quantise)(const float * column, int64_t first, int64_t n, char * to);
    // out[c][r] = weight[r] * column c, for rows first .. end - 1 and up to `most_together` columns.
    void (*multiply)(const char * weight, size_t row_stride, int64_t first, int64_t end, int64_t n_groups,
                     const char * columns, int n_columns, char * out, size_t out_stride);
};

struct Kernels {
    const char * name;
    Kernel       of[n_weight_types];
};

extern const Kernels avx2_kernels, avx_vnni_kernels, avx512_kernels;

} // namespace oa::decode
