// One product of a quantised matrix with few columns as our kernels see it. Plain data: files compiled for other
// instruction sets share it.
#pragma once

#include <cstddef>
#include <cstdint>

#define OA_INLINE __attribute__((always_inline)) inline

namespace oa::decode {

enum class WeightType : int { q4_0, q8_0, mxfp4, q4_k, q6_k };

constexpr int n_weight_types = 5;

// Rows and columns are looked at in groups of values. Behind the last values of a column are zeros.
constexpr int64_t group_values = 256;

constexpr int64_t groups_of(int64_t n_values) {
    return (n_values + group_values - 1) / group_values;
}

struct Column {
    const char * groups; // quantised
    float *      out;    // its products with the rows
};

struct Kernel {
    int64_t block_values; // rows are whole blocks
    // A group of a column, up to `group_values` values: bytes and scales in the order in which they are read.
    void (*quantise)(const float * values, int64_t n, char * to);
    // The products of rows with columns. `then`: rows that are likely read next, or null.
    void (*multiply)(const char * rows, size_t row_stride, int64_t n_rows, int64_t n_values, const Column * columns,
                     int64_t n_columns, const char * then);
};

struct Kernels {
    const char * name;
    int64_t      group_bytes; // of a column
    Kernel       of[n_weight_types];
};

extern const Kernels avx2_kernels, avx_vnni_kernels, avx512_kernels;

} // namespace oa::decode
