// One item of a task: the online softmax of its query rows over its part of the cache, block by block.
#pragma once

#include "state.h"
#include "vectors.h"

namespace {

constexpr float nothing = -__builtin_inff();

// Some cells of K or V that lie one behind the other.
struct Cells {
    const char * first;
    size_t       row, head; // bytes to the next one
};

class Item {
  public:
    Item(const Task & task, const Place & at, float * scratch);

    void run(Worked worked);
    void write(float * partials);

  private:
    const uint16_t * mask_row(int64_t token) const {
        return reinterpret_cast<const uint16_t *>(task_.mask + size_t(token) * task_.mask_strides.row +
                                                  size_t(at_.sequence % task_.mask_sequences) *
                                                      task_.mask_strides.sequence);
    }

    const float * query_row(int64_t head, int64_t row) const {
        const int64_t token = (at_.row + row) / task_.group(), of_group = (at_.row + row) % task_.group();
        return reinterpret_cast<const float *>(task_.q + size_t(token) * task_.q_strides.row +
                                               size_t((at_.head + head) * task_.group() + of_group) *
                                                   task_.q_strides.head +
                                               size_t(at_.sequence) * task_.q_strides.sequence);
    }

    // What a query token's mask says of a block of the cache.
    const uint16_t * mask_of(int64_t token, int64_t begin) const {
        return task_.cells ? seen_ : mask_row(token) + begin;
    }

    const char * k_at(int64_t token) const {
        return k_ + size_t(token) * task_.k_strides.row + size_t(at_.head) * task_.k_strides.head;
    }

    const char * v_at(int64_t token) const {
        return v_ + size_t(token) * task_.v_strides.row + size_t(at_.head) * task_.v_strides.head;
    }

    bool  look(int64_t begin, int64_t n);
    void  gather_mask(int64_t begin, int64_t n);
    float slope(int64_t head) const;
    float query_scale() const { return task_.softcap != 0.0f ? task_.scale / task_.softcap : task_.scale; }
    void  write_row(int64_t head, int64_t row, float most, float sum, const float * values, int64_t stride,
                    float * partials) const;

    // By dots or words (item_rows.h).
    void  take_rows();
    void  rows(int64_t begin, int64_t n);
    Cells cells_of(const char * cache, const Strides & strides, size_t bytes, int64_t begin, int64_t n) const;
    void  weigh(int64_t head, int64_t row, int64_t begin, int64_t n);
    // By columns or tiles (item_columns.h, item_tiles.h).
    void take_columns();
    void columns(int64_t begin, int64_t n);
    void weigh_columns(int64_t begin, int64_t n);
    void add_masks(int64_t begin, int64_t n);
    void take_tiles();
    void tiles(int64_t begin, int64_t n);

    const Task &  task_;
    const Place & at_;
    const char *  k_;
    const char *  v_;
    int64_t       first_token_, n_tokens_;
    int64_t       rows_begin_, rows_end_; // that see some of the block
    uint16_t      seen_[block_tokens];    // of a row alone: its mask of the block
    State         s_;
};

Item::Item(const Task & task, const Place & at, float * scratch) : task_(task), at_(at) {
    k_           = task.k + size_t(at.sequence * task.kv_sequences / task.n_sequences) * task.k_strides.sequence;
    v_           = task.v + size_t(at.sequence * task.kv_sequences / task.n_sequences) * task.v_strides.sequence;
    first_token_ = at.row / task.group();
    n_tokens_    = (at.row + at.n_rows - 1) / task.group() + 1 - first_token_;
    Memory memory{ scratch };
    s_                     = state_in(task, memory);
    const int64_t all_rows = is_by_rows(task.method) ? at.n_rows * at.n_heads : s_.stride;
    for (int64_t i = 0; i < all_rows; ++i) {
        s_.most[i] = nothing;
        s_.sum[i]  = 0.0f;
    }
    memset(s_.values, 0, size_t(all_rows * task.d_v) * sizeof(float));
    switch (task.method) {
        case Method::dots:
        case Method::words: take_rows(); break;
        case Method::columns: take_columns(); break;
        case Method::tiles: take_tiles(); break;
    }
}

// Notes what each query token sees of a block, and which rows see some of it; whether any does.
bool Item::look(int64_t begin, int64_t n) {
    int64_t first = n_tokens_, end = 0;
    if (task_.cells && task_.mask) {
        gather_mask(begin, n);
    }
    for (int64_t i = 0; i < n_tokens_; ++i) {
        s_.sights[i] = task_.mask ? sight_of(mask_of(first_token_ + i, begin), n) : Sight::all;
        if (s_.sights[i] != Sight::none) {
            first = i < first ? i : first;
            end   = i + 1;
        }
    }
    rows_begin_ = (first_token_ + first) * task_.group() - at_.row;
    rows_end_   = (first_token_ + end) * task_.group() - at_.row;
    rows_begin_ = rows_begin_ > 0 ? rows_begin_ : 0;
    rows_end_   = rows_end_ < at_.n_rows ? rows_end_ : at_.n_rows;
    return first < end;
}

void Item::gather_mask(int64_t begin, int64_t n) {
    const uint16_t * row = mask_row(first_token_);
    for (int64_t i = 0; i < n; ++i) {
        seen_[i] = row[task_.cells[begin + i]];
    }
}

float Item::slope(int64_t head) const {
    if (task_.max_bias <= 0.0f) {
        return 1.0f;
    }
    int64_t below = 1;
    while (2 * below <= task_.n_head) {
        below *= 2;
    }
    const float of_first = __builtin_powf(2.0f, -task_.max_bias / float(below));
    const float of_rest  = __builtin_powf(2.0f, -task_.max_bias / 2.0f / float(below));
    return head < below ? __builtin_powf(of_first, float(head + 1)) :
                          __builtin_powf(of_rest, float(2 * (head - below) + 1));
}

void Item::run(Worked worked) {
    for (int64_t begin = at_.begin; begin < at_.end; begin += block_tokens) {
        const int64_t n = at_.end - begin < block_tokens ? at_.end - begin : block_tokens;
        if (!look(begin, n)) {
            continue;
        }
        switch (task_.method) {
            case Method::dots:
            case Method::words: rows(begin, n); break;
            case Method::columns: columns(begin, n); break;
            case Method::tiles: tiles(begin, n); break;
        }
        worked(at_.n_heads * (rows_end_ - rows_begin_) * n * (task_.d_k + task_.d_v));
    }
}

// Ends a row: the sink, the division, its place. Or keeps it as a part of several.
void Item::write_row(int64_t head, int64_t row, float most, float sum, const float * values, int64_t stride,
                     float * partials) const {
    const int64_t token = (at_.row + row) / task_.group();
    const int64_t query = (at_.head + head) * task_.group() + (at_.row + row) % task_.group();
    if (partials) {
        const int64_t number = (at_.sequence * task_.n_tokens + token) * task_.n_head + query;
        float *       to     = partials + (number * task_.n_splits + at_.split) * task_.partial_floats();
        to[0]                = most;
        to[1]                = sum;
        for (int64_t i = 0; i < task_.d_v; ++i) {
            to[2 + i] = values[i * stride];
        }
        return;
    }
    float * to     = reinterpret_cast<float *>(task_.out + size_t(query) * task_.out_strides.head +
                                           size_t(token) * task_.out_strides.row +
                                           size_t(at_.sequence) * task_.out_strides.sequence);
    float   scaled = 1.0f;
    if (task_.sinks) {
        const float sink = task_.sinks[query], newest = sink > most ? sink : most;
        scaled = exp_of(all(most - newest))[0];
        sum    = sum * scaled + exp_of(all(sink - newest))[0];
    }
    const float share = sum != 0.0f ? scaled / sum : 0.0f;
    for (int64_t i = 0; i < task_.d_v; ++i) {
        to[i] = values[i * stride] * share;
    }
}

void Item::write(float * partials) {
    const bool columns = task_.method == Method::columns;
    for (int64_t h = 0; h < at_.n_heads; ++h) {
        for (int64_t r = 0; r < at_.n_rows; ++r) {
            const int64_t state  = h * at_.n_rows + r;
            const float * values = columns ? s_.values + r : s_.values + state * task_.d_v;
            write_row(h, r, s_.most[state], s_.sum[state], values, columns ? s_.stride : 1, partials);
        }
    }
}

} // namespace
