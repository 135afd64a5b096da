// Which part of a task an item is.
#pragma once

#include "task.h"

namespace {

using namespace oa::attend;

struct Place {
    int64_t sequence, head, n_heads, row, n_rows, begin, end, split;
};

Place place_of(const Task & t, int64_t item) {
    Place at;
    at.split = item % t.n_splits;
    item /= t.n_splits;
    const int64_t tile = item % t.n_tiles;
    item /= t.n_tiles;
    at.head     = item % t.n_groups * t.heads_per_group;
    at.sequence = item / t.n_groups;
    at.n_heads  = t.n_head_kv - at.head < t.heads_per_group ? t.n_head_kv - at.head : t.heads_per_group;
    at.row      = tile * t.rows_per_tile;
    at.n_rows   = t.rows() - at.row < t.rows_per_tile ? t.rows() - at.row : t.rows_per_tile;
    at.begin    = at.split * t.split_tokens;
    at.end      = t.n_kv - at.begin < t.split_tokens ? t.n_kv : at.begin + t.split_tokens;
    return at;
}

} // namespace
