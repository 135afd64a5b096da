// An item by tiles.
#pragma once

#include "item_columns.h"
#include "tiles.h"

namespace {

#if defined(__AMX_BF16__)

struct ByTiles {
    void (*rows)(const char *, size_t, int64_t, int64_t, int64_t, Parts);
    void (*pairs)(const char *, size_t, int64_t, int64_t, int64_t, Parts);
    bool is_upper; // upper parts are all there is
};

template <class T> constexpr ByTiles by_tiles(bool is_upper) {
    return { &pack_rows<T>, &pack_pairs<T>, is_upper };
}

constexpr ByTiles tiles_of[n_cache_types] = { by_tiles<F32>(false), by_tiles<F16>(false), by_tiles<BF16>(true),
                                              by_tiles<Q8_0>(false), by_tiles<Q4_0>(false) };

void Item::take_tiles() {
    const int64_t words = padded(task_.d_k, 2 * side) / 2;
    const Parts   all   = parts_in(s_.queries, s_.stride * words);
    for (int64_t first = 0; first < s_.stride; first += side) {
        const auto row = [&](int64_t r) { return first + r < at_.n_rows ? query_row(0, first + r) : nullptr; };
        pack_queries(row, query_scale(), task_.d_k, { all.upper + first * words, all.lower + first * words });
    }
}

void Item::tiles(int64_t begin, int64_t n) {
    rows_begin_          = rows_begin_ / side * side;
    rows_end_            = padded(rows_end_, side);
    const int64_t  first = rows_begin_ / side, n_tiles = rows_end_ / side - first;
    const int64_t  n_tokens = padded(n, 2 * side), words = padded(task_.d_k, 2 * side) / 2;
    const ByTiles &of_k = tiles_of[int(task_.k_type)], &of_v = tiles_of[int(task_.v_type)];

    const Parts k = parts_in(s_.block, block_tokens * words), q = parts_in(s_.queries, s_.stride * words);
    of_k.rows(k_at(begin), task_.k_strides.row, n, n_tokens, task_.d_k, k);
    const Factor keys{ k.upper, of_k.is_upper ? nullptr : k.lower, words, side * words, side };
    const Factor queries{ q.upper, q.lower, side, side * words, side * side };
    all_tiles(keys, n_tokens / side, queries.from(first), n_tiles, words / side, s_.scores + rows_begin_, s_.stride,
              false);

    weigh_columns(begin, n);
    memset(s_.scores + n * s_.stride, 0, size_t((n_tokens - n) * s_.stride) * sizeof(float));
    const Parts w = parts_in(s_.weights, s_.stride * block_tokens / 2);
    for (int64_t r = rows_begin_; r < rows_end_; r += side) {
        const int64_t at = r * block_tokens / 2;
        pack_weights(s_.scores + r, s_.stride, n_tokens, { w.upper + at, w.lower + at });
    }
    for (int64_t r = rows_begin_; r < rows_end_; ++r) {
        if (s_.shrinks[r] != 1.0f) {
            for (int64_t i = 0; i < task_.d_v; i += width) {
                float * at = s_.values + r * task_.d_v + i;
                store(at, load(at) * s_.shrinks[r]);
            }
        }
    }
    const Parts v = parts_in(s_.block, block_tokens / 2 * task_.d_v);
    of_v.pairs(v_at(begin), task_.v_strides.row, n, n_tokens, task_.d_v, v);
    const Factor weights{ w.upper, w.lower, block_tokens / 2, side * block_tokens / 2, side };
    const Factor values{ v.upper, of_v.is_upper ? nullptr : v.lower, task_.d_v, side, side * task_.d_v };
    all_tiles(weights.from(first), n_tiles, values, task_.d_v / side, n_tokens / 2 / side,
              s_.values + rows_begin_ * task_.d_v, task_.d_v, true);
}

#else

struct TileShapes {};

void Item::take_tiles() {}

void Item::tiles(int64_t, int64_t) {}

#endif

} // namespace
