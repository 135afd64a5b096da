// The kernels, for the instruction set that the including file is compiled for: a panel of rows is unpacked to bytes
// once for all columns (weights.h), chunk by chunk so that it stays in the nearest cache, and multiplied with tiles of
// columns (activations.h) in registers.
#pragma once

#include "activations.h"

namespace {

constexpr int64_t chunk_bytes  = 16 << 10; // of a panel, unpacked at once
constexpr int64_t chunk_blocks = chunk_bytes / panel_rows / block_values;

struct Scratch {
    alignas(64) Bytes values[chunk_blocks * block_groups * panel_vectors];
    Floats scales[chunk_blocks * 2 * panel_vectors];
    Floats minima[chunk_blocks * panel_vectors];
    Floats sums[1][panel_vectors]; // of all columns
};

size_t scratch_bytes(int64_t n_columns) {
    return sizeof(Scratch) + size_t(n_columns) * sizeof(Floats[panel_vectors]);
}

template <class T> void unpack(const char * const * rows, int64_t first_block, int64_t n_blocks, Scratch & to) {
    constexpr int64_t blocks_of_one = T::values / block_values;
    for (int v = 0; v < panel_vectors; ++v) {
        const char * at[width];
        for (int r = 0; r < width; ++r) {
            at[r] = rows[v * width + r] + first_block / blocks_of_one * T::bytes;
        }
        for (int64_t b = 0; b < n_blocks; b += blocks_of_one) {
            T::unpack(at, { to.values + b * block_groups * panel_vectors + v,
                            to.scales + b * (block_values / T::part) * panel_vectors + v,
                            to.minima + b * panel_vectors + v });
            for (int r = 0; r < width; ++r) {
                at[r] += T::bytes;
            }
        }
    }
}

// Fetches what `unpack` reads of some of a panel's rows.
template <class T> void prefetch(const char * const * rows, int64_t n_rows, int64_t first_block, int64_t n_blocks) {
    constexpr int64_t blocks_of_one = T::values / block_values;
    for (int64_t r = 0; r < n_rows; ++r) {
        const char * at  = rows[r] + first_block / blocks_of_one * T::bytes;
        const char * end = at + n_blocks / blocks_of_one * T::bytes;
        for (; at < end; at += 64) {
            __builtin_prefetch(at, 0, 2);
        }
    }
}

inline int32_t int_at(const char * p) {
    int32_t value;
    memcpy(&value, p, 4);
    return value;
}

inline Floats float_at(const char * p) {
    float value;
    memcpy(&value, p, 4);
    return all(value);
}

// s[c][.] = products of one part of a block, of its groups of four values w and x.
template <class T, int n>
OA_INLINE void products_of_part(const Bytes * w, const char * x, const char * begins,
                                typename T::Sums (&s)[n][panel_vectors]) {
#pragma GCC    unroll 16
    for (int c = 0; c < n; ++c) {
           const int32_t begin = T::minimum ? 0 : int_at(begins + 4 * c);
#pragma GCC unroll 16
        for (int v = 0; v < panel_vectors; ++v) {
            s[c][v] = T::Sums::begin(begin);
        }
    }
#pragma GCC unroll groups_at_once
    for (int g = 0; g < T::part / 4; ++g) {
        Bytes rows[panel_vectors];
#pragma GCC unroll 16
        for (int v = 0; v < panel_vectors; ++v) {
            rows[v] = w[g * panel_vectors + v];
        }
#pragma GCC unroll 16
        for (int c = 0; c < n; ++c) {
            const Ints values = all(int_at(x + 4 * (g * n + c)));
#pragma GCC unroll 16
            for (int v = 0; v < panel_vectors; ++v) {
                s[c][v].add(rows[v], values);
            }
        }
    }
}

// sums[c][.] += the panel's chunk times n columns.
template <class T, int n>
void products_tile(const Scratch & panel, const char * x, int64_t n_blocks, Floats (*sums)[panel_vectors]) {
    constexpr int  n_parts = int(block_values) / T::part, groups = T::part / 4;
    const Bytes *  w      = panel.values;
    const Floats * scales = panel.scales;
    const Floats * minima = panel.minima;
    Floats         sum[n][panel_vectors];
    memcpy(sum, sums, sizeof(sum));
    for (int64_t b = 0; b < n_blocks; ++b, x += n * block_bytes<T>, minima += panel_vectors) {
        const char * begins = x + n * block_values;
        const char * d      = begins + 4 * n * n_parts;
#pragma GCC unroll 16
        for (int part = 0; part < n_parts; ++part, w += groups * panel_vectors, scales += panel_vectors) {
            typename T::Sums s[n][panel_vectors];
            products_of_part<T, n>(w, x + 4 * n * groups * part, begins + 4 * n * part, s);
#pragma GCC unroll 16
            for (int v = 0; v < panel_vectors; ++v) {
#pragma GCC unroll 16
                for (int c = 0; c < n; ++c) {
                    sum[c][v] += floats(s[c][v].total()) * (scales[v] * float_at(d + 4 * c));
                    if constexpr (T::minimum) {
                        sum[c][v] += minima[v] * float_at(begins + 4 * c);
                    }
                }
            }
        }
    }
    memcpy(sums, sum, sizeof(sum));
}

template <class T, int n>
void products_of(int64_t wanted, const Scratch & panel, const char * x, int64_t n_blocks,
                 Floats (*sums)[panel_vectors]) {
    if constexpr (n > 0) {
        if (wanted == n) {
            products_tile<T, n>(panel, x, n_blocks, sums);
        } else {
            products_of<T, n - 1>(wanted, panel, x, n_blocks, sums);
        }
    }
}

template <class T>
void run(const Task & task, int64_t panel, int64_t first_tile, int64_t n_tiles, const char * quantised, char * memory) {
    Scratch &     scratch = *reinterpret_cast<Scratch *>(memory);
    const int64_t first = panel * panel_rows, left = task.n_rows - first;
    const int64_t n_rows = left < panel_rows ? left : panel_rows;
    const char *  rows[panel_rows];
    for (int64_t r = 0; r < panel_rows; ++r) {
        rows[r] = task.weight + size_t(first + (r < n_rows ? r : n_rows - 1)) * task.row_stride;
    }
    const int64_t first_column = first_tile * tile_columns, all_blocks = task.n_k / block_values;
    int64_t       n_columns = n_tiles * tile_columns;
    n_columns               = task.n_columns - first_column < n_columns ? task.n_columns - first_column : n_columns;
    memset(static_cast<void *>(scratch.sums), 0, size_t(n_columns) * sizeof(scratch.sums[0]));
    for (int64_t b = 0; b < all_blocks; b += chunk_blocks) {
        const int64_t n_blocks = all_blocks - b < chunk_blocks ? all_blocks - b : chunk_blocks;
        unpack<T>(rows, b, n_blocks, scratch);
        const int64_t next = b + n_blocks, n_next = all_blocks - next < chunk_blocks ? all_blocks - next : chunk_blocks;
        for (int64_t t = 0; t < n_tiles; ++t) {
            const int64_t r = t * panel_rows / n_tiles;
            prefetch<T>(rows + r, (t + 1) * panel_rows / n_tiles - r, next, n_next);
            const int64_t n = columns_of_tile(task, first_tile + t);
            const char *  x = quantised + tile_offset<T>(task, first_tile + t) + b * n * block_bytes<T>;
            products_of<T, tile_columns>(n, scratch, x, n_blocks, scratch.sums + t * tile_columns);
        }
    }
    for (int64_t c = 0; c < n_columns; ++c) {
        memcpy(task.out_of(first_column + c) + size_t(first) * sizeof(float), scratch.sums[c],
               size_t(n_rows) * sizeof(float));
    }
}

struct Typed {
    size_t (*columns_bytes)(const Task &);
    void (*quantise)(const Task &, int64_t, int64_t, int64_t, char *);
    void (*run)(const Task &, int64_t, int64_t, int64_t, const char *, char *);
};

template <class T> constexpr Typed typed() {
    return { &columns_bytes<T>, &quantise<T>, &run<T> };
}

constexpr Typed by_type[n_weight_types] = { typed<Q4_0>(), typed<Q8_0>(), typed<MXFP4>(), typed<Q4_K>(),
                                            typed<Q6_K>() };

size_t columns_bytes_of(const Task & task) {
    return by_type[int(task.type)].columns_bytes(task);
}

void quantise_of(const Task & task, int64_t tile, int64_t first_block, int64_t n_blocks, char * to) {
    by_type[int(task.type)].quantise(task, tile, first_block, n_blocks, to);
}

void run_of(const Task & task, int64_t panel, int64_t first_tile, int64_t n_tiles, const char * quantised,
            char * scratch) {
    by_type[int(task.type)].run(task, panel, first_tile, n_tiles, quantised, scratch);
}

constexpr Kernels kernels_named(const char * name) {
    return { name, panel_rows, tile_columns, &columns_bytes_of, &scratch_bytes, &quantise_of, &run_of };
}

} // namespace
