// The kernels, for the instruction set that the including file is compiled for.
//
// Few query rows ("dots"): a K/V block is read straight from the cache, each row of K against all query rows that share
// it. Many rows ("columns"): the queries of a tile are transposed once, the block is widened to f32 once, and products
// are of a block's single values with columns of queries. Sums are f32 in both.
#pragma once

#include "task.h"
#include "vectors.h"

namespace {

using namespace oa::attend;

constexpr int    row_tile     = registers >= 32 ? 6 : 2; // rows x 4 tokens stay in registers
constexpr int    column_tile  = registers >= 32 ? 4 : 2; // vectors of query rows
constexpr int    sums_kept    = registers >= 32 ? 24 : 12;
constexpr size_t ahead        = 8; // tokens whose rows are prefetched
constexpr int    mixed_tokens = 8; // whose values are added to a head before the next head's
constexpr float  nothing      = -__builtin_inff();

inline void prefetch(const char * p, int64_t nbytes) {
    for (int64_t at = 0; at < nbytes; at += 64) {
        __builtin_prefetch(p + at, 0, 2);
    }
}

template <class T> constexpr int64_t bytes_of(int64_t n_values) {
    return n_values / T::block * T::bytes;
}

// ---- dots
// ------------------------------------------------------------------------------------------------------------

template <class K, int n_rows> void scores_of_rows(const float * q, int64_t d, const char * const * k, float * scores) {
    Floats sum[n_rows][4] = {};
    for (int64_t i = 0; i < d; i += width) {
        Floats values[4];
#pragma GCC unroll 16
        for (int t = 0; t < 4; ++t) {
            values[t] = K::load(k[t], i);
        }
#pragma GCC unroll 16
        for (int r = 0; r < n_rows; ++r) {
            const Floats query = load(q + r * d + i);
#pragma GCC unroll 16
            for (int t = 0; t < 4; ++t) {
                sum[r][t] += query * values[t];
            }
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < n_rows; ++r) {
        const FourFloats four = sums(sum[r][0], sum[r][1], sum[r][2], sum[r][3]);
        memcpy(scores + r * block_tokens, &four, sizeof(four));
    }
}

// Of the heads that are computed together: how many, and the bytes from one to the next in the cache.
struct Heads {
    int64_t n, n_rows; // n_rows: of queries, of each
    size_t  stride;
};

// scores[h][r][t] of all query rows with n tokens. Token by token, all heads: the cache is read as it lies in memory.
template <class K>
void scores_by_dots(const float * q, const Heads & heads, int64_t d, const char * k, size_t stride, int64_t n,
                    float * scores) {
    for (int64_t t = 0; t < n; t += 4) {
        for (int64_t h = 0; h < heads.n; ++h) {
            const char * rows[4];
            for (int64_t i = 0; i < 4; ++i) {
                rows[i] = k + size_t(t + i < n ? t + i : n - 1) * stride + size_t(h) * heads.stride;
                prefetch(rows[i] + ahead * stride, bytes_of<K>(d));
            }
            const float * of_head = q + h * heads.n_rows * d;
            float *       to      = scores + h * heads.n_rows * block_tokens + t;
            int64_t       r       = 0;
            for (; r + row_tile <= heads.n_rows; r += row_tile) {
                scores_of_rows<K, row_tile>(of_head + r * d, d, rows, to + r * block_tokens);
            }
            const float * rest = of_head + r * d;
            to += r * block_tokens;
            switch (heads.n_rows - r) {
                case 1: scores_of_rows<K, 1>(rest, d, rows, to); break;
                case 2: scores_of_rows<K, 2>(rest, d, rows, to); break;
                case 3: scores_of_rows<K, 3>(rest, d, rows, to); break;
                case 4: scores_of_rows<K, 4>(rest, d, rows, to); break;
                case 5: scores_of_rows<K, 5>(rest, d, rows, to); break;
            }
        }
    }
}

template <class V, int n_rows, int n_vectors>
void mix_rows(const float * weights, const char * v, size_t stride, int64_t n, int64_t d, int64_t from, float * out) {
    Floats sum[n_rows][n_vectors];
#pragma GCC unroll 16
    for (int r = 0; r < n_rows; ++r) {
#pragma GCC unroll 16
        for (int c = 0; c < n_vectors; ++c) {
            sum[r][c] = load(out + r * d + from + c * width);
        }
    }
    for (int64_t t = 0; t < n; ++t) {
        Floats values[n_vectors];
#pragma GCC unroll 16
        for (int c = 0; c < n_vectors; ++c) {
            values[c] = V::load(v + size_t(t) * stride, from + c * width);
        }
#pragma GCC unroll 16
        for (int r = 0; r < n_rows; ++r) {
            const Floats weight = all(weights[r * block_tokens + t]);
#pragma GCC unroll 16
            for (int c = 0; c < n_vectors; ++c) {
                sum[r][c] += weight * values[c];
            }
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < n_rows; ++r) {
#pragma GCC unroll 16
        for (int c = 0; c < n_vectors; ++c) {
            store(out + r * d + from + c * width, sum[r][c]);
        }
    }
}

template <class V, int n_rows>
void mix_widths(const float * weights, const char * v, size_t stride, int64_t n, int64_t d, float * out) {
    int64_t from = 0;
    for (; from + 4 * width <= d; from += 4 * width) {
        mix_rows<V, n_rows, 4>(weights, v, stride, n, d, from, out);
    }
    for (; from < d; from += width) {
        mix_rows<V, n_rows, 1>(weights, v, stride, n, d, from, out);
    }
}

// out[h][r] += sum over t of weights[h][r][t] * v[t][h], some tokens at a time for all heads.
template <class V>
void mix_by_dots(const float * weights, const Heads & heads, const char * v, size_t stride, int64_t n, int64_t d,
                 float * out) {
    for (int64_t t = 0; t < n; t += mixed_tokens) {
        const int64_t some = n - t < mixed_tokens ? n - t : mixed_tokens;
        for (int64_t h = 0; h < heads.n; ++h) {
            const char *  rows    = v + size_t(t) * stride + size_t(h) * heads.stride;
            const float * of_head = weights + h * heads.n_rows * block_tokens + t;
            float *       to      = out + h * heads.n_rows * d;
            int64_t       r       = 0;
            for (int64_t i = 0; i < some; ++i) {
                prefetch(rows + size_t(i + int64_t(ahead)) * stride, bytes_of<V>(d));
            }
            for (; r + row_tile <= heads.n_rows; r += row_tile) {
                mix_widths<V, row_tile>(of_head + r * block_tokens, rows, stride, some, d, to + r * d);
            }
            const float * rest = of_head + r * block_tokens;
            switch (heads.n_rows - r) {
                case 1: mix_widths<V, 1>(rest, rows, stride, some, d, to + r * d); break;
                case 2: mix_widths<V, 2>(rest, rows, stride, some, d, to + r * d); break;
                case 3: mix_widths<V, 3>(rest, rows, stride, some, d, to + r * d); break;
                case 4: mix_widths<V, 4>(rest, rows, stride, some, d, to + r * d); break;
                case 5: mix_widths<V, 5>(rest, rows, stride, some, d, to + r * d); break;
            }
        }
    }
}

// ---- columns
// ---------------------------------------------------------------------------------------------------------

template <class T> void widen(const char * rows, size_t stride, int64_t n, int64_t d, size_t ahead, float * out) {
    for (int64_t t = 0; t < n; ++t) {
        if (ahead) {
            prefetch(rows + size_t(t) * stride + ahead, bytes_of<T>(d));
        }
        for (int64_t i = 0; i < d; i += width) {
            store(out + t * d + i, T::load(rows + size_t(t) * stride, i));
        }
    }
}

// out[t][.] (+)= sum over i of single[t * of_t + i * of_i] * columns[i][.], n_out values t at once: a tile of out rows
// by vectors of columns.
template <int n_out, int n_vectors>
void products_tile(const float * single, int64_t of_t, int64_t of_i, const float * columns, int64_t n, float * out) {
    Floats sum[n_out][n_vectors];
#pragma GCC unroll 16
    for (int t = 0; t < n_out; ++t) {
#pragma GCC unroll 16
        for (int c = 0; c < n_vectors; ++c) {
            sum[t][c] = load(out + t * tile_rows + c * width);
        }
    }
    for (int64_t i = 0; i < n; ++i) {
        Floats values[n_vectors];
#pragma GCC unroll 16
        for (int c = 0; c < n_vectors; ++c) {
            values[c] = load(columns + i * tile_rows + c * width);
        }
#pragma GCC unroll 16
        for (int t = 0; t < n_out; ++t) {
            const Floats one = all(single[t * of_t + i * of_i]);
#pragma GCC unroll 16
            for (int c = 0; c < n_vectors; ++c) {
                sum[t][c] += one * values[c];
            }
        }
    }
#pragma GCC unroll 16
    for (int t = 0; t < n_out; ++t) {
#pragma GCC unroll 16
        for (int c = 0; c < n_vectors; ++c) {
            store(out + t * tile_rows + c * width, sum[t][c]);
        }
    }
}

template <int n_vectors>
void products(const float * single, int64_t of_t, int64_t of_i, const float * columns, int64_t n_out, int64_t n,
              float * out) {
    constexpr int n_at_once = sums_kept / n_vectors < 12 ? sums_kept / n_vectors : 12;
    int64_t       t         = 0;
    for (; t + n_at_once <= n_out; t += n_at_once) {
        products_tile<n_at_once, n_vectors>(single + t * of_t, of_t, of_i, columns, n, out + t * tile_rows);
    }
    for (; t + 4 <= n_out; t += 4) {
        products_tile<4, n_vectors>(single + t * of_t, of_t, of_i, columns, n, out + t * tile_rows);
    }
    for (; t < n_out; ++t) {
        products_tile<1, n_vectors>(single + t * of_t, of_t, of_i, columns, n, out + t * tile_rows);
    }
}

// All columns up to n_columns, a multiple of the width.
void all_products(const float * single, int64_t of_t, int64_t of_i, const float * columns, int64_t n_columns,
                  int64_t n_out, int64_t n, float * out) {
    int64_t c = 0;
    for (; c + column_tile * width <= n_columns; c += column_tile * width) {
        products<column_tile>(single, of_t, of_i, columns + c, n_out, n, out + c);
    }
    for (; c + 2 * width <= n_columns; c += 2 * width) {
        products<2>(single, of_t, of_i, columns + c, n_out, n, out + c);
    }
    for (; c < n_columns; c += width) {
        products<1>(single, of_t, of_i, columns + c, n_out, n, out + c);
    }
}

// ---- by type
// ---------------------------------------------------------------------------------------------------------

using Scores = void (*)(const float *, const Heads &, int64_t, const char *, size_t, int64_t, float *);
using Mix    = void (*)(const float *, const Heads &, const char *, size_t, int64_t, int64_t, float *);
using Widen  = void (*)(const char *, size_t, int64_t, int64_t, size_t, float *);

struct Typed {
    Scores scores;
    Mix    mix;
    Widen  widened;
};

template <class T> constexpr Typed typed() {
    return { &scores_by_dots<T>, &mix_by_dots<T>, &widen<T> };
}

constexpr Typed by_type[n_cache_types] = { typed<F32>(), typed<F16>(), typed<BF16>(), typed<Q8_0>(), typed<Q4_0>() };

// ---- one item
// --------------------------------------------------------------------------------------------------------

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

// What a query token sees of a block.
enum class Sight : char { none, all, some };

Sight sight_of(const uint16_t * mask, int64_t n) {
    uint16_t seen = 0, added = 0;
    for (int64_t i = 0; i < n; ++i) {
        seen |= uint16_t(mask[i] ^ 0xfc00);
        added |= uint16_t(mask[i] & 0x7fff);
    }
    return !seen ? Sight::none : !added ? Sight::all : Sight::some;
}

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
    void  columns(int64_t begin, int64_t n, size_t k_ahead, size_t v_ahead);
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
        const bool   more    = begin + n < at_.end;
        const size_t k_ahead = more ? size_t(block_tokens) * task_.k_strides.row : 0;
        const size_t v_ahead = more ? size_t(block_tokens) * task_.v_strides.row : 0;
        if (task_.columns) {
            columns(begin, n, k_ahead, v_ahead);
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
    if (newest == nothing) {
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

void Item::columns(int64_t begin, int64_t n, size_t k_ahead, size_t v_ahead) {
    const char * k = k_ + size_t(begin) * task_.k_strides.row + size_t(at_.head) * task_.k_strides.head;
    const char * v = v_ + size_t(begin) * task_.v_strides.row + size_t(at_.head) * task_.v_strides.head;
    by_type[int(task_.k_type)].widened(k, task_.k_strides.row, n, task_.d_k, k_ahead, block_);
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
    by_type[int(task_.v_type)].widened(v, task_.v_strides.row, n, task_.d_v, v_ahead, block_);
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
    const float share = sum > 0.0f ? scaled / sum : 0.0f;
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

void run_item(const Task & task, int64_t number, float * scratch, float * partials, Worked worked) {
    const Place at = place_of(task, number);
    Item        item(task, at, scratch);
    item.run(worked);
    item.write(partials);
}

} // namespace
