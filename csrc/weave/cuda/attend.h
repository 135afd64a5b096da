// An item of attention: some rows of a sequence, some heads that share a head of K and V, a range of tokens.
//
// A group of lanes takes a token at a time: each lane 8 values of K and of V, for all queries of the item, so K and V
// are read once for all of them and no thread waits for another but to add up scores. Groups keep a running maximum,
// sum and output each; merge.h makes one of them. That is flash-decoding.
//
// Each thread fetches the pieces of its next tokens into shared memory while it computes with those before. Few warps
// fit, with so many registers: without this the memory stands still while they compute.
//
// New tokens, which are the task's own rows, are read from the task: no item waits until another one has stored them.
#pragma once

#include "receiver_state.h"

namespace oa::weave::cuda {

// What all threads of a block know of an item.
struct Item {
    const float *    q; // of the first row's first head
    const float *    new_k;
    const float *    new_v; // of the sequence's first row, this head
    const float *    sinks; // of the first head, or null
    float *          out;   // of the first row's first head
    char *           pool_k;
    char *           pool_v; // of this layer and head, in block 0 of the pool
    const uint32_t * pages;  // of the sequence
    size_t           block_nbytes;
    uint32_t         n_pool_blocks;
    uint32_t         q_stride, k_stride, v_stride, out_stride; // floats from row to row
    uint32_t         d_k, d_v;
    uint32_t         first_row, n_rows, n_heads, n_queries; // rows of the sequence's
    uint32_t         first_head;                            // of all
    uint32_t         position;                              // of the sequence's first row
    uint32_t         begin, end;                            // tokens
    uint32_t         partial, first_partial, n_splits;      // of this split; of its output
    float            scale, softcap, max_bias;
    bool             stores; // the rows' own tokens, those that are among this item's
};

// Memory of a block. On CUDA 34 KiB.
template <int n_values> struct Shared {
    // First the pieces of tokens that threads have fetched; then of every group of lanes queries x D values, n_values =
    // groups x D. Both take the same memory.
    alignas(16) float values[n_values * max_queries];
    float    max[n_values / 64 * max_queries], sum[n_values / 64 * max_queries];
    float    slope[max_queries];
    uint32_t window[n_window];
    uint32_t claimed; // of the Block
    uint32_t status;
    Item     item;
};

// ggml's, of head `head` of n_head.
inline OA_DEVICE float alibi_slope(float max_bias, uint32_t n_head, uint32_t head) {
    uint32_t floor = 1;
    while (floor * 2 <= n_head) {
        floor *= 2;
    }
    const float base = exp2f(-(head < floor ? max_bias : max_bias / 2.0f) / float(floor));
    return powf(base, float(head < floor ? head + 1 : 2 * (head - floor) + 1));
}

// An item's old tokens, those before the task's own, are read in windows of n_window blocks: where they end, and where
// the window that begins at `from` does.
inline OA_DEVICE uint32_t old_end(const Item & item) {
    return item.end < item.position ? item.end : item.position;
}

inline OA_DEVICE uint32_t window_end(const Item & item, uint32_t from) {
    const uint32_t end = old_end(item), most = n_window * block_tokens;
    return end - from < most ? end : from + most;
}

// Numbers of a window's blocks, for all threads. One that cannot be is none of a sequence's.
template <class Block> OA_DEVICE void load_window(Block & b, const Item & item, uint32_t from) {
    b.sync();
    const uint32_t first = from / block_tokens, n = (window_end(item, from) - 1) / block_tokens - first + 1;
    for (uint32_t at = uint32_t(b.thread()); at < n; at += uint32_t(b.n_threads())) {
        const uint32_t block  = Block::load(item.pages + first + at);
        b.shared().window[at] = block < item.n_pool_blocks ? block : 0;
    }
    b.sync();
}

// Where the block of a token is in the pool, of the window that begins at `from`.
template <class Block> OA_DEVICE size_t block_of(Block & b, const Item & item, uint32_t token, uint32_t from) {
    return b.shared().window[token / block_tokens - from / block_tokens] * item.block_nbytes;
}

template <class Format, int D, int n_queries, class Block> class Attention {
    static constexpr int n_lanes = Block::template lanes<D>();
    static constexpr int n_own   = D / chunk_values / n_lanes; // pieces of 8 values of a lane; 1 on CUDA

    using Raw    = typename Format::Raw;
    using Staged = typename Format::Staged;

    // Tokens that a group of lanes fetches, and computes with, at once. Two such stages fill the block's memory.
    static constexpr uint32_t at_once = uint32_t(chunk_values * max_queries) / (sizeof(Staged) / sizeof(float)) / 4;

  public:
    OA_DEVICE Attention(Block & block, const Item & item) :
        b_(block), i_(item), group_(uint32_t(block.thread() / n_lanes)), lane_(uint32_t(block.thread() % n_lanes)),
        n_groups_(uint32_t(block.n_threads() / n_lanes)), softcap_(item.softcap), max_bias_(item.max_bias) {}

    // Leaves maximum, sum and output of every group in the block's shared memory.
    OA_DEVICE void run() {
        const uint32_t end = old_end(i_), stride = at_once * n_groups_;
        if (i_.begin < end) {
            open_window(i_.begin);
        }
        load_queries(); // meanwhile
        for (uint32_t from = i_.begin; from < end; from += n_window * block_tokens) {
            if (from != i_.begin) {
                open_window(from);
            }
            const uint32_t to    = window_end(i_, from);
            uint32_t       stage = 0;
            for (uint32_t at = from; at < to; at += stride) {     // as often in every group: they share warps
                fetch(at + stride + group_, from, to, 1 - stage); // of no token, at the end
                b_.template await_fetched<1>();
                step(at + group_, to, stage);
                stage = 1 - stage;
            }
        }
        const uint32_t new_begin = i_.begin > i_.position ? i_.begin : i_.position;
        for (uint32_t at = new_begin; at < i_.end; at += n_groups_) {
            new_step(at + group_);
        }
        b_.sync(); // others' pieces are where this thread's values go
        save();
    }

  private:
    OA_DEVICE void load_queries() {
        const float scale = i_.softcap != 0.0f ? i_.scale / i_.softcap : i_.scale;
        OA_UNROLL
        for (int g = 0; g < n_queries; ++g) {
            max_[g] = -INFINITY;
            sum_[g] = 0.0f;
            OA_UNROLL
            for (int own = 0; own < n_own; ++own) {
                const uint32_t piece = lane_ + uint32_t(own * n_lanes);
                const float *  from  = i_.q + size_t(uint32_t(g) / i_.n_heads) * i_.q_stride +
                                     uint32_t(g) % i_.n_heads * i_.d_k + piece * chunk_values;
                const bool there = uint32_t(g) < i_.n_queries && piece * chunk_values < i_.d_k;
                OA_UNROLL
                for (int j = 0; j < chunk_values; ++j) {
                    q_[own][g][j]   = there ? from[j] * scale : 0.0f;
                    out_[own][g][j] = 0.0f;
                }
            }
        }
    }

    // Begins to fetch the window's first tokens.
    OA_DEVICE void open_window(uint32_t from) {
        load_window(b_, i_, from);
        fetch(from + group_, from, window_end(i_, from), 0);
    }

    // Where this thread's piece of K (0) or V (1) of a stage's token is.
    OA_DEVICE Staged & staged(uint32_t stage, uint32_t token, int of_v, int own) {
        const uint32_t at = ((stage * at_once + token) * 2 + uint32_t(of_v)) * uint32_t(n_own) + uint32_t(own);
        return reinterpret_cast<Staged *>(b_.shared().values)[at * uint32_t(b_.n_threads()) + uint32_t(b_.thread())];
    }

    // Begins to fetch tokens at, at + n_groups, .. below `end`. from: the window's first.
    OA_DEVICE void fetch(uint32_t at, uint32_t from, uint32_t end, uint32_t stage) {
        OA_UNROLL
        for (uint32_t u = 0; u < at_once; ++u) {
            const uint32_t token = at + u * n_groups_;
            if (token >= end) {
                break;
            }
            const size_t   block = block_of(b_, i_, token, from);
            const uint32_t row   = token % block_tokens;
            OA_UNROLL
            for (int own = 0; own < n_own; ++own) {
                const uint32_t piece = lane_ + uint32_t(own * n_lanes);
                if (piece * chunk_values < i_.d_k) {
                    Format::fetch(b_, staged(stage, u, 0, own), i_.pool_k + block, row, i_.d_k, piece);
                }
                if (piece * chunk_values < i_.d_v) {
                    Format::fetch(b_, staged(stage, u, 1, own), i_.pool_v + block, row, i_.d_v, piece);
                }
            }
        }
        b_.end_fetch();
    }

    // Computes with the tokens that fetch() has brought.
    OA_DEVICE void step(uint32_t at, uint32_t end, uint32_t stage) {
        float wide[n_own][chunk_values];
        float scores[at_once][n_queries], weights[at_once][n_queries];
        OA_UNROLL
        for (uint32_t u = 0; u < at_once; ++u) {
            take(stage, u, at + u * n_groups_, end, 0, i_.d_k, wide);
            dot(wide, scores[u]);
        }
        OA_UNROLL
        for (uint32_t u = 0; u < at_once; ++u) { // all rows see old tokens
            const uint32_t token = at + u * n_groups_;
            bend(token, scores[u]);
            OA_UNROLL
            for (int g = 0; g < n_queries; ++g) {
                scores[u][g] = token < end ? scores[u][g] : -INFINITY;
            }
        }
        weigh<at_once>(scores, weights);
        OA_UNROLL
        for (uint32_t u = 0; u < at_once; ++u) {
            take(stage, u, at + u * n_groups_, end, 1, i_.d_v, wide);
            add(wide, weights[u]);
        }
    }

    // Zeros where nothing was fetched.
    OA_DEVICE void take(uint32_t stage, uint32_t u, uint32_t token, uint32_t end, int of_v, uint32_t d,
                        float (&wide)[n_own][chunk_values]) {
        OA_UNROLL
        for (int own = 0; own < n_own; ++own) {
            const uint32_t piece = lane_ + uint32_t(own * n_lanes);
            Raw            raw   = {};
            if (token < end && piece * chunk_values < d) {
                raw = Format::take(staged(stage, u, of_v, own), token % block_tokens, d, piece);
            }
            Format::widen(raw, wide[own]);
        }
    }

    OA_DEVICE void new_step(uint32_t token) {
        float        k[n_own][chunk_values] = {}, v[n_own][chunk_values] = {};
        const size_t row = token - i_.position;
        OA_UNROLL
        for (int own = 0; own < n_own; ++own) {
            const uint32_t piece = lane_ + uint32_t(own * n_lanes);
            if (token < i_.end && piece * chunk_values < i_.d_k) {
                Format::widen_new(i_.new_k + row * i_.k_stride, piece, k[own]);
            }
            if (token < i_.end && piece * chunk_values < i_.d_v) {
                Format::widen_new(i_.new_v + row * i_.v_stride, piece, v[own]);
            }
        }
        float scores[1][n_queries], weights[1][n_queries];
        dot(k, scores[0]);
        bend(token, scores[0]);
        OA_UNROLL
        for (int g = 0; g < n_queries; ++g) {
            scores[0][g] = token < i_.end && token <= own_token(g) ? scores[0][g] : -INFINITY;
        }
        weigh<1>(scores, weights);
        add(v, weights[0]);
    }

    // Without a branch: the sums of all tokens and queries run side by side.
    OA_DEVICE void dot(const float (&k)[n_own][chunk_values], float (&scores)[n_queries]) {
        OA_UNROLL
        for (int g = 0; g < n_queries; ++g) {
            float part = 0.0f;
            OA_UNROLL
            for (int own = 0; own < n_own; ++own) {
                OA_UNROLL
                for (int j = 0; j < chunk_values; ++j) {
                    part += q_[own][g][j] * k[own][j];
                }
            }
            scores[g] = b_.template sum<D>(part);
        }
    }

    OA_DEVICE uint32_t own_token(int g) const { return i_.position + i_.first_row + uint32_t(g) / i_.n_heads; }

    // Softcap and ALiBi.
    OA_DEVICE void bend(uint32_t token, float (&scores)[n_queries]) {
        if (softcap_ != 0.0f) {
            OA_UNROLL
            for (int g = 0; g < n_queries; ++g) {
                scores[g] = softcap_ * Block::tanh(scores[g]);
            }
        }
        if (max_bias_ > 0.0f) {
            OA_UNROLL
            for (int g = 0; g < n_queries; ++g) {
                const float distance = token <= own_token(g) ? float(own_token(g) - token) : 0.0f;
                scores[g] -= b_.shared().slope[g] * widen_f16(narrow_f16(distance)); // llama.cpp's mask is in f16
            }
        }
    }

    // From scores to weights relative to the new maximum; what was added up so far becomes relative to it, too.
    template <uint32_t n> OA_DEVICE void weigh(const float (&scores)[n][n_queries], float (&weights)[n][n_queries]) {
        OA_UNROLL
        for (int g = 0; g < n_queries; ++g) {
            float max = max_[g];
            OA_UNROLL
            for (uint32_t u = 0; u < n; ++u) {
                max = fmaxf(max, scores[u][g]);
            }
            const float base  = max == -INFINITY ? 0.0f : max; // nothing seen yet: all weights are exp(-inf)
            const float scale = Block::exp(max_[g] - base);
            max_[g]           = max;
            sum_[g] *= scale;
            OA_UNROLL
            for (int own = 0; own < n_own; ++own) {
                OA_UNROLL
                for (int j = 0; j < chunk_values; ++j) {
                    out_[own][g][j] *= scale;
                }
            }
            OA_UNROLL
            for (uint32_t u = 0; u < n; ++u) {
                weights[u][g] = Block::exp(scores[u][g] - base);
                sum_[g] += weights[u][g];
            }
        }
    }

    OA_DEVICE void add(const float (&v)[n_own][chunk_values], const float (&weights)[n_queries]) {
        OA_UNROLL
        for (int g = 0; g < n_queries; ++g) {
            OA_UNROLL
            for (int own = 0; own < n_own; ++own) {
                OA_UNROLL
                for (int j = 0; j < chunk_values; ++j) {
                    out_[own][g][j] += weights[g] * v[own][j];
                }
            }
        }
    }

    OA_DEVICE void save() {
        auto & shared = b_.shared();
        OA_UNROLL
        for (int g = 0; g < n_queries; ++g) {
            if (lane_ == 0) {
                shared.max[group_ * max_queries + uint32_t(g)] = max_[g];
                shared.sum[group_ * max_queries + uint32_t(g)] = sum_[g];
            }
            OA_UNROLL
            for (int own = 0; own < n_own; ++own) {
                const uint32_t piece = lane_ + uint32_t(own * n_lanes);
                float *        to    = shared.values + (group_ * max_queries + uint32_t(g)) * D + piece * chunk_values;
                OA_UNROLL
                for (int j = 0; j < chunk_values; ++j) {
                    to[j] = out_[own][g][j];
                }
            }
        }
        b_.sync();
    }

    Block &        b_;
    const Item &   i_;
    const uint32_t group_, lane_, n_groups_;
    const float    softcap_, max_bias_;

    float q_[n_own][n_queries][chunk_values];
    float out_[n_own][n_queries][chunk_values];
    float max_[n_queries], sum_[n_queries];
};

} // namespace oa::weave::cuda
