// What an item keeps while it goes through its part of the cache. All of it lies in the thread's working memory.
#pragma once

#include "place.h"
#include "room_for_words.h"
#include "sights.h"

namespace {

// Hands out parts of the working memory, or counts them where there is none yet.
struct Memory {
    float * begin;
    int64_t used = 0;

    float * take(int64_t n_floats) {
        float * part = begin ? begin + used : nullptr;
        used += (n_floats + 15) / 16 * 16;
        return part;
    }
};

// By dots and words, rows lie one after the other, those of all heads of the group. By columns and tiles there is one
// head, and rows lie beside each other in scores: scores[token][row].
struct State {
    int64_t stride; // of rows in `scores`: as many as there may be
    float * queries;
    float * values; // by columns [value][row], else [row][value]
    float * most;
    float * sum;
    float * shrinks;
    float * scores;
    float * block; // of K, then of V: widened, as words, or as tiles
    float * weights;
    Sight * sights;
    char *  copies; // of cells that do not lie together
};

int64_t padded(int64_t n, int64_t to) {
    return (n + to - 1) / to * to;
}

// Room for the rows of a tile. By columns, an odd number of cache lines: a power of two would leave most sets of the
// first cache unused.
int64_t room_for_rows(const Task & t) {
    switch (t.method) {
        case Method::dots:
        case Method::words: return t.rows_per_tile * t.heads_per_group;
        case Method::columns: return padded(t.rows_per_tile, 32) + 16;
        default: return padded(t.rows_per_tile, 16);
    }
}

int64_t floats_of_block(const Task & t, int64_t widest) {
    switch (t.method) {
        case Method::dots: return 0;
        case Method::words: {
            const int64_t keys = room_for_keys(t.d_k), values = room_for_values(t.rows_per_tile);
            return keys > values ? keys : values;
        }
        default: return block_tokens * widest;
    }
}

State state_in(const Task & t, Memory & memory) {
    const bool    by_rows = is_by_rows(t.method), tiles = t.method == Method::tiles;
    const int64_t rows = room_for_rows(t);
    const int64_t d_k = padded(t.d_k, tiles ? 32 : 1), widest = d_k > t.d_v ? d_k : t.d_v;
    State         s;
    s.stride              = by_rows ? block_tokens : rows;
    s.queries             = memory.take(rows * d_k);
    s.values              = memory.take(rows * t.d_v);
    s.most                = memory.take(rows);
    s.sum                 = memory.take(rows);
    s.shrinks             = memory.take(by_rows ? 0 : rows);
    s.scores              = memory.take(rows * block_tokens);
    s.block               = memory.take(floats_of_block(t, widest));
    s.weights             = memory.take(tiles ? block_tokens * rows : 0);
    s.sights              = reinterpret_cast<Sight *>(memory.take((t.rows_per_tile + t.group() - 1) / t.group() + 1));
    const int64_t of_cell = t.heads_per_group * int64_t(t.k_bytes > t.v_bytes ? t.k_bytes : t.v_bytes);
    s.copies = reinterpret_cast<char *>(memory.take(t.alone ? block_tokens * of_cell / int64_t(sizeof(float)) + 1 : 0));
    return s;
}

size_t scratch_floats(const Task & t) {
    Memory memory{ nullptr };
    state_in(t, memory);
    return size_t(memory.used);
}

} // namespace
