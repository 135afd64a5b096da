// One item of a task: the online softmax of its query rows over its part of the cache, block by block.
#pragma once

#include "columns.h"
#include "dots.h"
#include "place.h"

namespace {

constexpr float nothing = -__builtin_inff();

using Scores = void (*)(const float *, const Heads &, int64_t, const char *, size_t, int64_t, float *);
using Mix    = void (*)(const float *, const Heads &, const char *, size_t, int64_t, int64_t, float *);
using Widen  = void (*)(const char *, size_t, int64_t, int64_t, float *);

struct Typed {
    Scores scores;
    Mix    mix;
    Widen  widened;
};

template <class T> constexpr Typed typed() {
    return { &scores_by_dots<T>, &mix_by_dots<T>, &widen<T> };
}

constexpr Typed by_type[n_cache_types] = { typed<F32>(), typed<F16>(), typed<BF16>(), typed<Q8_0>(), typed<Q4_0>() };

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

    bool  look(int64_t begin, int64_t n);
    float slope(int64_t head) const;
    void  take_queries(int64_t head, float * to) const;
    void  dots(int64_t begin, int64_t n);
    void  weigh(int64_t head, int64_t row, int64_t begin, int64_t n);
    void  columns(int64_t begin, int64_t n);
    void  write_row(int64_t head, int64_t row, float most, float sum, const float * values, int64_t stride,
                    float * partials) const;

    const Task &  task_;
    const Place & at_;
    const char *  k_;
    const char *  v_;
    int64_t       first_token_, n_tokens_, n_rows_; // n_rows_: with those that fill up a vector of columns
    float *       queries_;
    float *       values_;
    float *       most_;
    float *       sum_;
    float *       scores_;
    float *       block_;
    Sight *       sights_;
};

int64_t rows_in_memory(const Task & t) {
    return t.columns ? tile_rows : t.rows_per_tile;
}

int64_t tokens_of_tile(const Task & t) {
    return (t.rows_per_tile + t.group() - 1) / t.group() + 1;
}

size_t scratch_floats(const Task & t) {
    const int64_t rows  = rows_in_memory(t) * t.heads_per_group;
    const int64_t block = t.columns ? block_tokens * (t.d_k > t.d_v ? t.d_k : t.d_v) : 0;
    return size_t(rows * (t.d_k + t.d_v) + 2 * ((rows + 15) / 16 * 16) + rows * block_tokens + block +
                  tokens_of_tile(t) + width);
}

Item::Item(const Task & task, const Place & at, float * scratch) : task_(task), at_(at) {
    const int64_t rows = rows_in_memory(task), all_rows = rows * task.heads_per_group;
    k_           = task.k + size_t(at.sequence * task.kv_sequences / task.n_sequences) * task.k_strides.sequence;
    v_           = task.v + size_t(at.sequence * task.kv_sequences / task.n_sequences) * task.v_strides.sequence;
    first_token_ = at.row / task.group();
    n_tokens_    = (at.row + at.n_rows - 1) / task.group() + 1 - first_token_;
    n_rows_      = task.columns ? (at.n_rows + width - 1) / width * width : at.n_rows;
    queries_     = scratch;
    values_      = queries_ + all_rows * task.d_k;
    most_        = values_ + all_rows * task.d_v;
    sum_         = most_ + (all_rows + 15) / 16 * 16;
    scores_      = sum_ + (all_rows + 15) / 16 * 16;
    block_       = scores_ + all_rows * block_tokens;
    sights_      = reinterpret_cast<Sight *>(
        block_ + (task.columns ? block_tokens * (task.d_k > task.d_v ? task.d_k : task.d_v) : 0));
    for (int64_t i = 0; i < all_rows; ++i) {
        most_[i] = nothing;
        sum_[i]  = 0.0f;
    }
    memset(values_, 0, size_t(all_rows * task.d_v) * sizeof(float));
    for (int64_t h = 0; h < at.n_heads; ++h) {
        take_queries(h, queries_ + h * rows * task.d_k);
    }
}

// Query rows of a head times the scale: one after the other, or as columns.
void Item::take_queries(int64_t head, float * to) const {
    const float scale = task_.softcap != 0.0f ? task_.scale / task_.softcap : task_.scale;
    if (task_.columns) {
        memset(to, 0, size_t(tile_rows * task_.d_k) * sizeof(float));
    }
    for (int64_t r = 0; r < at_.n_rows; ++r) {
        const int64_t token = (at_.row + r) / task_.group(), of_group = (at_.row + r) % task_.group();
        const char *  from = task_.q + size_t(token) * task_.q_strides.row +
                            size_t((at_.head + head) * task_.group() + of_group) * task_.q_strides.head +
                            size_t(at_.sequence) * task_.q_strides.sequence;
        const float * values = reinterpret_cast<const float *>(from);
        for (int64_t i = 0; i < task_.d_k; ++i) {
            to[task_.columns ? i * tile_rows + r : r * task_.d_k + i] = values[i] * scale;
        }
    }
}

// Notes what each query token sees of a block; whether any sees some of it.
bool Item::look(int64_t begin, int64_t n) {
    bool seen = !task_.mask;
    for (int64_t i = 0; i < n_tokens_; ++i) {
        sights_[i] = task_.mask ? sight_of(mask_row(first_token_ + i) + begin, n) : Sight::all;
        seen |= sights_[i] != Sight::none;
    }
    return seen;
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
        if (task_.columns) {
            columns(begin, n);
        } else {
            dots(begin, n);
        }
        worked(at_.n_heads * at_.n_rows * n * (task_.d_k + task_.d_v));
    }
}

void Item::dots(int64_t begin, int64_t n) {
    const Heads  heads{ at_.n_heads, at_.n_rows, task_.k_strides.head };
    const char * k = k_ + size_t(begin) * task_.k_strides.row + size_t(at_.head) * task_.k_strides.head;
    const char * v = v_ + size_t(begin) * task_.v_strides.row + size_t(at_.head) * task_.v_strides.head;
    by_type[int(task_.k_type)].scores(queries_, heads, task_.d_k, k, task_.k_strides.row, n, scores_);
    for (int64_t h = 0; h < at_.n_heads; ++h) {
        for (int64_t r = 0; r < at_.n_rows; ++r) {
            weigh(h, r, begin, n);
        }
    }
    by_type[int(task_.v_type)].mix(scores_, { heads.n, heads.n_rows, task_.v_strides.head }, v, task_.v_strides.row, n,
                                   task_.d_v, values_);
}

// Whether there is a NaN: it must show in the result.
bool is_odd(const float * values, int64_t n) {
    bool odd = false;
    for (int64_t i = 0; i < n; ++i) {
        odd |= values[i] != values[i];
    }
    return odd;
}

// Turns scores of a row with a block into weights, and shrinks what was summed before if a larger score came.
void Item::weigh(int64_t head, int64_t r, int64_t begin, int64_t n) {
    const int64_t n_padded = (n + width - 1) / width * width;
    const int64_t state = head * at_.n_rows + r, token = (at_.row + r) / task_.group();
    const Sight   sight = sights_[token - first_token_];
    float *       s     = scores_ + state * block_tokens;
    float *       out   = values_ + state * task_.d_v;
    if (sight == Sight::none) {
        memset(s, 0, size_t(n) * sizeof(float));
        return;
    }
    if (task_.softcap != 0.0f) {
        for (int64_t i = 0; i < n; i += width) {
            store(s + i, tanh_of(load(s + i)) * task_.softcap);
        }
    }
    if (sight == Sight::some) {
        const float  times = slope((at_.head + head) * task_.group() + (at_.row + r) % task_.group());
        const auto * mask  = mask_row(token) + begin;
        for (int64_t i = 0; i < n; i += width) {
            if (i + width <= n) {
                store(s + i, load(s + i) + from_half(mask + i) * times);
            } else {
                for (int64_t j = i; j < n; ++j) {
                    s[j] += from_half(mask[j]) * times;
                }
            }
        }
    }
    for (int64_t i = n; i < n_padded; ++i) {
        s[i] = nothing;
    }
    Floats most = all(nothing);
    for (int64_t i = 0; i < n_padded; i += width) {
        most = larger(most, load(s + i));
    }
    float newest = most_[state];
    for (int i = 0; i < width; ++i) {
        newest = most[i] > newest ? most[i] : newest;
    }
    if (newest == nothing && !is_odd(s, n_padded)) {
        memset(s, 0, size_t(n) * sizeof(float));
        return;
    }
    if (newest > most_[state]) {
        const float shrinks = exp_of(all(most_[state] - newest))[0];
        for (int64_t i = 0; i < task_.d_v; i += width) {
            store(out + i, load(out + i) * shrinks);
        }
        sum_[state] *= shrinks;
        most_[state] = newest;
    }
    Floats sum = {};
    for (int64_t i = 0; i < n_padded; i += width) {
        const Floats weight = exp_of(load(s + i) - newest);
        store(s + i, weight);
        sum += weight;
    }
    sum_[state] += sums(sum, Floats{}, Floats{}, Floats{})[0];
}

void Item::columns(int64_t begin, int64_t n) {
    const char * k = k_ + size_t(begin) * task_.k_strides.row + size_t(at_.head) * task_.k_strides.head;
    const char * v = v_ + size_t(begin) * task_.v_strides.row + size_t(at_.head) * task_.v_strides.head;
    by_type[int(task_.k_type)].widened(k, task_.k_strides.row, n, task_.d_k, block_);
    memset(scores_, 0, size_t(n * tile_rows) * sizeof(float));
    all_products(block_, task_.d_k, 1, queries_, n_rows_, n, task_.d_k, scores_);
    if (task_.softcap != 0.0f) {
        for (int64_t i = 0; i < n * tile_rows; i += width) {
            store(scores_ + i, tanh_of(load(scores_ + i)) * task_.softcap);
        }
    }
    for (int64_t r = 0; r < at_.n_rows; ++r) {
        const int64_t token = (at_.row + r) / task_.group();
        const Sight   sight = sights_[token - first_token_];
        if (sight == Sight::all) {
            continue;
        }
        const float  times = slope(at_.head * task_.group() + (at_.row + r) % task_.group());
        const auto * mask  = mask_row(token) + begin;
        for (int64_t t = 0; t < n; ++t) {
            scores_[t * tile_rows + r] += from_half(mask[t]) * times;
        }
    }
    for (int64_t c = 0; c < n_rows_; c += width) {
        const Floats before = load(most_ + c);
        Floats       most   = before;
        for (int64_t t = 0; t < n; ++t) {
            most = larger(most, load(scores_ + t * tile_rows + c));
        }
        // A row that has seen nothing yet: any finite number keeps exp_of from NaN.
        const Floats reference = larger(most, all(-1e30f));
        const Floats shrinks   = exp_of(larger(before, all(-1e30f)) - reference);
        Floats       sum       = load(sum_ + c) * shrinks;
        for (int64_t t = 0; t < n; ++t) {
            const Floats weight = exp_of(load(scores_ + t * tile_rows + c) - reference);
            store(scores_ + t * tile_rows + c, weight);
            sum += weight;
        }
        store(most_ + c, most);
        store(sum_ + c, sum);
        for (int64_t i = 0; i < task_.d_v; ++i) {
            store(values_ + i * tile_rows + c, load(values_ + i * tile_rows + c) * shrinks);
        }
    }
    by_type[int(task_.v_type)].widened(v, task_.v_strides.row, n, task_.d_v, block_);
    all_products(block_, 1, task_.d_v, scores_, n_rows_, task_.d_v, n, values_);
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
    for (int64_t h = 0; h < at_.n_heads; ++h) {
        for (int64_t r = 0; r < at_.n_rows; ++r) {
            const int64_t state  = h * at_.n_rows + r;
            const float * values = task_.columns ? values_ + r : values_ + state * task_.d_v;
            write_row(h, r, most_[state], sum_[state], values, task_.columns ? tile_rows : 1, partials);
        }
    }
}

} // namespace
