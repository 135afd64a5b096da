// Columns of activations as bytes: blocks of 32 values with a scale each, in f32. A tile's columns lie beside each
// other, block by block: [group of four values][column][4 bytes], then [part][column] what the sums begin with (or, for
// weights with minima, the sum of the block's values), then [column] the scales.
#pragma once

#include "weights.h"

namespace {

template <class T> constexpr int64_t block_bytes = block_values + 4 * (block_values / T::part) + 4;

template <class T> size_t columns_bytes(const Task & task) {
    return size_t(task.n_columns * (task.n_k / block_values) * block_bytes<T>);
}

inline int64_t columns_of_tile(const Task & task, int64_t tile) {
    const int64_t left = task.n_columns - tile * tile_columns;
    return left < tile_columns ? left : tile_columns;
}

template <class T> int64_t tile_offset(const Task & task, int64_t tile) {
    return tile * tile_columns * (task.n_k / block_values) * block_bytes<T>;
}

// Writes the values as bytes, and what the sums of each part begin with. Returns the scale, which is not finite where a
// value is not.
template <class T> float quantised(const float * x, int8_t * q, int32_t * begins) {
    constexpr int   n     = int(block_values) / width;
    constexpr float magic = 12582912.0f; // rounds to an integer, which is then in the low bits
    Ints            most  = {};
    for (int i = 0; i < n; ++i) {
        // Sizes as integers have the order of floats, NaN last.
        const Ints size = (Ints) load(x + i * width) & 0x7fffffff;
        most            = size > most ? size : most;
    }
    const int32_t bits = largest_of(most);
    float         largest;
    memcpy(&largest, &bits, sizeof(largest));
    const Floats inverse = all(largest > 0.0f ? 127.0f / largest : 0.0f);
    Ints         numbers[n];
    for (int i = 0; i < n; ++i) {
        typedef int8_t Some __attribute__((vector_size(width)));
        numbers[i]      = (Ints) (load(x + i * width) * inverse + magic) - (Ints) all(magic);
        const Some some = __builtin_convertvector(numbers[i], Some);
        memcpy(q + i * width, &some, width);
    }
    for (int part = 0; part < block_values / T::part; ++part) {
        Ints sum = {};
        for (int i = 0; i < T::part / width; ++i) {
            sum += numbers[part * (T::part / width) + i];
        }
        if constexpr (T::minimum) {
            const float of_values = largest / 127.0f * float(sum_of(sum));
            memcpy(begins + part, &of_values, sizeof(of_values));
        } else {
            begins[part] = T::Sums::bias(sum, T::offset);
        }
    }
    return largest / 127.0f;
}

template <class T> void quantise(const Task & task, int64_t tile, int64_t first_block, int64_t n_blocks, char * to) {
    const int64_t n = columns_of_tile(task, tile);
    to += tile_offset<T>(task, tile) + first_block * n * block_bytes<T>;
    for (int64_t c = 0; c < n; ++c) {
        const float * x  = task.column(tile * tile_columns + c) + first_block * block_values;
        char *        at = to + 4 * c;
        for (int64_t b = 0; b < n_blocks; ++b, x += block_values, at += n * block_bytes<T>) {
            constexpr int n_values = int(block_values), n_parts = n_values / T::part;
            char          made[block_bytes<T>];
            int32_t       begins[n_parts];
            const float   scale = quantised<T>(x, reinterpret_cast<int8_t *>(made), begins);
            memcpy(made + n_values, begins, sizeof(begins));
            memcpy(made + n_values + sizeof(begins), &scale, sizeof(scale));
            for (int i = 0; i < block_bytes<T>; i += 4) {
                memcpy(at + i * n, made + i, 4);
            }
        }
    }
}

} // namespace
