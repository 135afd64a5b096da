// An item by columns. What is said of scores[token][row] here holds by tiles, too.
#pragma once

#include "columns.h"
#include "item.h"

namespace {

using Widen = void (*)(const char *, size_t, int64_t, int64_t, float *);

constexpr Widen widened[n_cache_types] = { &widen<F32>, &widen<F16>, &widen<BF16>, &widen<Q8_0>, &widen<Q4_0> };

void Item::take_columns() {
    const float scale = query_scale();
    memset(s_.queries, 0, size_t(s_.stride * task_.d_k) * sizeof(float));
    for (int64_t r = 0; r < at_.n_rows; ++r) {
        const float * from = query_row(0, r);
        for (int64_t i = 0; i < task_.d_k; ++i) {
            s_.queries[i * s_.stride + r] = from[i] * scale;
        }
    }
}

void Item::columns(int64_t begin, int64_t n) {
    // Whole vectors of rows.
    rows_begin_         = rows_begin_ / width * width;
    rows_end_           = padded(rows_end_, width);
    const int64_t first = rows_begin_, n_rows = rows_end_ - rows_begin_;
    const Matrix  queries{ s_.queries + first, s_.stride }, scores{ s_.scores + first, s_.stride };
    widened[int(task_.k_type)](k_at(begin), task_.k_strides.row, n, task_.d_k, s_.block);
    for (int64_t t = 0; t < n; ++t) {
        memset(scores.at + t * scores.stride, 0, size_t(n_rows) * sizeof(float));
    }
    all_products(s_.block, task_.d_k, 1, queries, n_rows, n, task_.d_k, scores);
    weigh_columns(begin, n);
    for (int64_t i = 0; i < task_.d_v; ++i) {
        for (int64_t c = rows_begin_; c < rows_end_; c += width) {
            float * at = s_.values + i * s_.stride + c;
            store(at, load(at) * load(s_.shrinks + c));
        }
    }
    widened[int(task_.v_type)](v_at(begin), task_.v_strides.row, n, task_.d_v, s_.block);
    all_products(s_.block, 1, task_.d_v, scores, n_rows, task_.d_v, n, { s_.values + first, s_.stride });
}

// Turns scores[token][row] into weights. What was summed before is to be multiplied by `shrinks`.
void Item::weigh_columns(int64_t begin, int64_t n) {
    if (task_.softcap != 0.0f) {
        for (int64_t t = 0; t < n; ++t) {
            for (int64_t c = rows_begin_; c < rows_end_; c += width) {
                float * at = s_.scores + t * s_.stride + c;
                store(at, tanh_of(load(at)) * task_.softcap);
            }
        }
    }
    if (task_.mask) {
        add_masks(begin, n);
    }
    for (int64_t c = rows_begin_; c < rows_end_; c += width) {
        const Floats before = load(s_.most + c);
        Floats       most   = before;
        for (int64_t t = 0; t < n; ++t) {
            most = larger(most, load(s_.scores + t * s_.stride + c));
        }
        // A row that has seen nothing yet: any finite number keeps exp_of from NaN.
        const Floats reference = larger(most, all(-1e30f));
        const Floats shrinks   = exp_of(larger(before, all(-1e30f)) - reference);
        Floats       sum       = load(s_.sum + c) * shrinks;
        for (int64_t t = 0; t < n; ++t) {
            const Floats weight = exp_of(load(s_.scores + t * s_.stride + c) - reference);
            store(s_.scores + t * s_.stride + c, weight);
            sum += weight;
        }
        store(s_.most + c, most);
        store(s_.sum + c, sum);
        store(s_.shrinks + c, shrinks);
    }
}

void Item::add_masks(int64_t begin, int64_t n) {
    const int64_t end = rows_end_ < at_.n_rows ? rows_end_ : at_.n_rows;
    float         of_token[block_tokens];
    int64_t       widened_token = -1;
    for (int64_t r = rows_begin_; r < end; ++r) {
        const int64_t token = (at_.row + r) / task_.group();
        if (s_.sights[token - first_token_] == Sight::all) {
            continue;
        }
        if (token != widened_token) {
            for (int64_t t = 0; t < n; ++t) {
                of_token[t] = from_half((mask_row(token) + begin)[t]);
            }
            widened_token = token;
        }
        const float times = slope(at_.head * task_.group() + (at_.row + r) % task_.group());
        for (int64_t t = 0; t < n; ++t) {
            s_.scores[t * s_.stride + r] += of_token[t] * times;
        }
    }
}

} // namespace
