// What the looks and works of a receiver find in the memory of its device; the host makes it, and changes of it only
// what is said to be the host's. Launches of one receiver never overlap: what one leaves is seen by the next.
#pragma once

#include "kv_rows.h"

namespace oa::weave::cuda {

constexpr uint32_t max_places = 256; // sequences at once

// A sequence's place, the host's. Its blocks of tokens are in a row of `pages`.
struct Place {
    uint32_t generation; // 0: nobody's
    uint32_t n_tokens;   // there is room for
};

// The sender that may be served, the host's. Written whole into setups[number % 2], then setup_number: a launch that
// has begun goes on with the one before (which it says it has done in `adopted`).
struct Setup {
    uint64_t epoch; // 0: nobody's
    char *   inbox; // Duplex
    char *   outbox;
    uint64_t task_nbytes, result_nbytes; // of a slot, its header included
    OpenTask shape;                      // of every sequence; max_tokens means nothing
    uint32_t n_slots;
    uint32_t n_pool_blocks;
};

// Of the open task, a sequence. Items are numbered sequence by sequence: ((tile, head of K and V), split).
struct OpenRows {
    uint32_t place, position, n_rows;
    uint32_t first_row; // of the task's
    uint32_t first_item, n_splits;
    uint32_t first_partial; // of the items of a sequence with several splits
};

struct OpenedTask {
    TaskHeader header; // a copy, as all of it: what the sender writes is read once
    AttendTask task;
    uint32_t   slot;
    uint32_t   tile_rows, tile_heads; // of an item: rows, and heads that share a head of K and V
    uint32_t   n_head_tiles;          // of the heads that share one
    uint32_t   split_tokens;
    uint32_t   n_items, n_outputs; // outputs: tiles, for each head of K and V
    uint32_t   answer_nbytes;      // of a ping
    OpenRows   rows[max_sequences];
};

struct alignas(line) Counter {
    uint32_t value;
};

struct ReceiverState {
    // Fixed, the host's.
    char *     pool;  // blocks of tokens
    uint32_t * pages; // max_places x pages_per_place
    float *    partials;
    uint32_t * merges;  // per partial: splits of its output that are done; all 0 between tasks
    uint32_t * adopted; // in host memory: number of the setup that launches have come to
    uint32_t   pages_per_place;
    uint32_t   max_partials;
    Place      places[max_places];
    Setup      setups[2];
    Counter    setup_number;

    // Of the work; all 0 between a work and the next look. is_open: by a look, for the work that follows it.
    Counter is_open, next_item, outputs, left;

    // From launch to launch.
    alignas(8) unsigned char channel[16]; // Duplex
    alignas(8) unsigned char ring[32];    // ReceiverRing
    uint32_t   number;                    // of the setup
    uint32_t   adopted_number;
    uint32_t   n_looks;
    uint32_t   n_tasks, n_refused;
    OpenedTask opened;
};

// Floats of a partial result: of every query the greatest score, the sum, the weighted values.
constexpr size_t partial_floats = size_t(max_queries) * (2 + max_width);

// Bytes of a block of tokens, and of a layer's part of it.
OA_HD constexpr size_t kv_layer_nbytes(const OpenTask & shape) {
    return block_tokens * (kv_token_nbytes(shape.k_type, shape.k_width) + kv_token_nbytes(shape.v_type, shape.v_width));
}

OA_HD constexpr size_t kv_block_nbytes(const OpenTask & shape) {
    return shape.n_layers * kv_layer_nbytes(shape);
}

} // namespace oa::weave::cuda
