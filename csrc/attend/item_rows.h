// An item by dots or words.
#pragma once

#include "dots.h"
#include "item.h"
#include "key_words.h"
#include "value_words.h"

namespace {

struct ByRows {
    void (*take)(float * row, int64_t d); // makes of a query row what `scores` takes; null: that takes floats
    void (*scores)(const float * q, const Heads & heads, int64_t d, const char * k, size_t stride, int64_t n,
                   float * room, float * scores);
    void (*mix)(float * weights, const Heads & heads, const char * v, size_t stride, int64_t n, int64_t d, float * room,
                float * out);
};

template <class T> constexpr ByRows by_dots() {
    return { nullptr, &scores_by_dots<T>, &mix_by_dots<T> };
}

constexpr ByRows dots_of[n_cache_types] = { by_dots<F32>(), by_dots<F16>(), by_dots<BF16>(), by_dots<Q8_0>(),
                                            by_dots<Q4_0>() };

template <class T> constexpr ByRows by_words() {
#if OA_HAS_WORDS
    return { &take_words, &scores_by_words<T>, &mix_by_words<T> };
#else
    return {};
#endif
}

// Of K and V, one may be no cache of bytes.
constexpr ByRows words_of[n_cache_types] = { by_dots<F32>(), by_dots<F16>(), by_dots<BF16>(), by_words<Q8_0>(),
                                             by_words<Q4_0>() };

const ByRows & by_rows(Method method, CacheType type) {
    return method == Method::words ? words_of[int(type)] : dots_of[int(type)];
}

void Item::take_rows() {
    const float scale = query_scale();
    const auto  take  = by_rows(task_.method, task_.k_type).take;
    for (int64_t h = 0; h < at_.n_heads; ++h) {
        for (int64_t r = 0; r < at_.n_rows; ++r) {
            const float * from = query_row(h, r);
            float *       to   = s_.queries + (h * at_.n_rows + r) * task_.d_k;
            for (int64_t i = 0; i < task_.d_k; ++i) {
                to[i] = from[i] * scale;
            }
            if (take) {
                take(to, task_.d_k);
            }
        }
    }
}

void Item::rows(int64_t begin, int64_t n) {
    const int64_t first = rows_begin_, n_rows = rows_end_ - rows_begin_;
    float *       scores = s_.scores + first * block_tokens;
    const Cells   k      = cells_of(k_, task_.k_strides, task_.k_bytes, begin, n);
    by_rows(task_.method, task_.k_type)
        .scores(s_.queries + first * task_.d_k, { at_.n_heads, at_.n_rows, n_rows, k.head }, task_.d_k, k.first, k.row,
                n, s_.block, scores);
    for (int64_t h = 0; h < at_.n_heads; ++h) {
        for (int64_t r = rows_begin_; r < rows_end_; ++r) {
            weigh(h, r, begin, n);
        }
    }
    const Cells v = cells_of(v_, task_.v_strides, task_.v_bytes, begin, n);
    by_rows(task_.method, task_.v_type)
        .mix(scores, { at_.n_heads, at_.n_rows, n_rows, v.head }, v.first, v.row, n, task_.d_v, s_.block,
             s_.values + first * task_.d_v);
}

// A block of the cache as it lies there, or copied where its cells lie apart. One block's copies are used at a time.
Cells Item::cells_of(const char * cache, const Strides & strides, size_t bytes, int64_t begin, int64_t n) const {
    const char * of_heads = cache + size_t(at_.head) * strides.head;
    if (!task_.cells) {
        return { of_heads + size_t(begin) * strides.row, strides.row, strides.head };
    }
    const int32_t * cells = task_.cells + begin;
    if (cells[n - 1] - cells[0] == n - 1) {
        return { of_heads + size_t(cells[0]) * strides.row, strides.row, strides.head };
    }
    char * to = s_.copies;
    for (int64_t i = 0; i < n; ++i) {
        for (int64_t h = 0; h < at_.n_heads; ++h, to += bytes) {
            memcpy(to, of_heads + size_t(cells[i]) * strides.row + size_t(h) * strides.head, bytes);
        }
    }
    return { s_.copies, size_t(at_.n_heads) * bytes, bytes };
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
    const int64_t n_padded = padded(n, width);
    const int64_t state = head * at_.n_rows + r, token = (at_.row + r) / task_.group();
    const Sight   sight = s_.sights[token - first_token_];
    float *       s     = s_.scores + state * block_tokens;
    float *       out   = s_.values + state * task_.d_v;
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
        const auto * mask  = mask_of(token, begin);
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
    const float of_block = largest(most);
    const float newest   = of_block > s_.most[state] ? of_block : s_.most[state];
    if (newest == nothing && !is_odd(s, n_padded)) {
        memset(s, 0, size_t(n) * sizeof(float));
        return;
    }
    if (newest > s_.most[state]) {
        const float shrinks = exp_of(all(s_.most[state] - newest))[0];
        for (int64_t i = 0; i < task_.d_v; i += width) {
            store(out + i, load(out + i) * shrinks);
        }
        s_.sum[state] *= shrinks;
        s_.most[state] = newest;
    }
    Floats sum = {};
    for (int64_t i = 0; i < n_padded; i += width) {
        const Floats weight = exp_of(load(s + i) - newest);
        store(s + i, weight);
        sum += weight;
    }
    s_.sum[state] += sums(sum, Floats{}, Floats{}, Floats{})[0];
}

} // namespace
