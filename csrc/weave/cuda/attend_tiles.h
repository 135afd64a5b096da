// Attention of an item by tensor cores: rows in f16, heads of 64 or 128 values, all queries of the item at once.
//
// A warp takes 16 tokens at a time. Scores are K (tokens x values) times Q^T, outputs V^T (values x tokens) times the
// weights (tokens x queries): eight queries are the narrow side of m16n8k16. As in attend.h each warp keeps a maximum,
// a sum and an output, and fetches its next tokens while it computes: K's while it adds up V, V's while it scores.
//
// Q and the weights are rounded to f16, as ggml's kernels for tensor cores do.
#pragma once

#include "attend.h"

namespace oa::weave::cuda {

template <int D, class Block> class TiledAttention {
    static constexpr uint32_t n_tokens = 16; // of a tile
    static constexpr int      n_steps  = D / 16;
    static constexpr uint32_t n_pieces = D / chunk_values; // of a token
    static constexpr uint32_t n_lanes  = 32;

  public:
    OA_DEVICE TiledAttention(Block & block, const Item & item) :
        b_(block), i_(item), warp_(uint32_t(block.thread()) / n_lanes), lane_(uint32_t(block.thread()) % n_lanes),
        stride_(uint32_t(block.n_threads()) / n_lanes * n_tokens) {}

    // As Attention::run(); groups are warps.
    OA_DEVICE void run() {
        const uint32_t end = old_end(i_);
        float          queries[n_steps][2][2];
        load_queries(queries);
        if (i_.begin < end) {
            open_window(i_.begin); // meanwhile
        }
        pack_queries(queries);
        for (uint32_t from = i_.begin; from < end; from += n_window * block_tokens) {
            if (from != i_.begin) {
                open_window(from);
            }
            const uint32_t to = window_end(i_, from);
            for (uint32_t at = from + warp_ * n_tokens; at < to; at += stride_) {
                float scores[4] = {};
                await_fetched();
                score(scores);
                b_.sync_warp();
                fetch(0, at + stride_, from, to);
                weigh(scores, at, to, false);
                await_fetched();
                add(scores);
                b_.sync_warp();
                fetch(1, at + stride_, from, to);
            }
        }
        const uint32_t new_begin = i_.begin > i_.position ? i_.begin : i_.position;
        for (uint32_t at = new_begin + warp_ * n_tokens; at < i_.end; at += stride_) {
            float scores[4] = {};
            b_.sync_warp();
            load_new(at);
            b_.sync_warp();
            score(scores);
            weigh(scores, at, i_.end, true);
            b_.sync_warp();
            add(scores);
        }
        save();
    }

  private:
    // This thread's queries: columns of the scores, which it holds of tokens row() and row() + 8 of a tile.
    OA_DEVICE uint32_t query(int j) const { return lane_ % 4 * 2 + uint32_t(j); }
    OA_DEVICE uint32_t row() const { return lane_ / 4; }

    // Where a piece of a token of this warp's tile of K (0) or V (1) is. Rows are turned against each other, so that
    // pieces of eight rows are in different banks.
    OA_DEVICE char * piece(uint32_t of_v, uint32_t token, uint32_t at) const {
        char * const tile = reinterpret_cast<char *>(b_.shared().values) + (warp_ * 2 + of_v) * n_tokens * D * 2;
        return tile + token * D * 2 + (at ^ token % 8) * chunk_values * 2;
    }

    OA_DEVICE void load_queries(float (&queries)[n_steps][2][2]) const {
        const bool    there = row() < i_.n_queries;
        const float * from =
            i_.q + size_t(row() / i_.n_heads) * i_.q_stride + row() % i_.n_heads * i_.d_k + lane_ % 4 * 2;
        OA_UNROLL
        for (int step = 0; step < n_steps; ++step) {
            OA_UNROLL
            for (int half = 0; half < 2; ++half) {
                const float * two      = from + step * 16 + half * 8;
                queries[step][half][0] = there ? two[0] : 0.0f;
                queries[step][half][1] = there ? two[1] : 0.0f;
            }
        }
    }

    OA_DEVICE void pack_queries(const float (&queries)[n_steps][2][2]) {
        const float scale = i_.softcap != 0.0f ? i_.scale / i_.softcap : i_.scale;
        OA_UNROLL
        for (int step = 0; step < n_steps; ++step) {
            OA_UNROLL
            for (int half = 0; half < 2; ++half) {
                q_[step][half] = pack(queries[step][half][0] * scale, queries[step][half][1] * scale);
            }
            OA_UNROLL
            for (int j = 0; j < 4; ++j) {
                out_[step][j] = 0.0f;
            }
        }
        OA_UNROLL
        for (int j = 0; j < 2; ++j) {
            max_[j]       = -INFINITY;
            sum_[j]       = 0.0f;
            own_token_[j] = i_.position + i_.first_row + query(j) / i_.n_heads;
        }
    }

    static OA_DEVICE uint32_t pack(float low, float high) {
        return uint32_t(narrow_f16(low)) | uint32_t(narrow_f16(high)) << 16;
    }

    // Begins to fetch the window's first tiles.
    OA_DEVICE void open_window(uint32_t from) {
        load_window(b_, i_, from);
        for (uint32_t of_v = 0; of_v < 2; ++of_v) {
            fetch(of_v, from + warp_ * n_tokens, from, window_end(i_, from));
        }
    }

    // Begins to fetch a tile, which is within a block of the pool; zeros for its tokens behind the end.
    OA_DEVICE void fetch(uint32_t of_v, uint32_t at, uint32_t from, uint32_t end) {
        if (at < end) {
            const size_t block = block_of(b_, i_, at, from);
            const char * head  = (of_v ? i_.pool_v : i_.pool_k) + block + size_t(at % block_tokens) * D * 2;
            OA_UNROLL
            for (uint32_t i = 0; i < n_tokens * n_pieces / n_lanes; ++i) {
                const uint32_t token = (lane_ + i * n_lanes) / n_pieces, p = (lane_ + i * n_lanes) % n_pieces;
                if (at + token < end) {
                    b_.template fetch<16>(piece(of_v, token, p), head + (token * D + p * chunk_values) * 2);
                } else {
                    *reinterpret_cast<Raw16 *>(piece(of_v, token, p)) = {};
                }
            }
        }
        b_.end_fetch();
    }

    // What was fetched before the last fetch().
    OA_DEVICE void await_fetched() {
        b_.template await_fetched<1>();
        b_.sync_warp();
    }

    // A tile of the task's own tokens.
    OA_DEVICE void load_new(uint32_t at) {
        for (uint32_t i = lane_; i < n_tokens * n_pieces; i += n_lanes) {
            const uint32_t token = i / n_pieces, p = i % n_pieces;
            const size_t   row   = at + token - i_.position;
            const bool     there = at + token < i_.end;
            store_new(piece(0, token, p), there ? i_.new_k + row * i_.k_stride + p * chunk_values : nullptr);
            store_new(piece(1, token, p), there ? i_.new_v + row * i_.v_stride + p * chunk_values : nullptr);
        }
    }

    static OA_DEVICE void store_new(char * to, const float * from) {
        Raw16 raw = {};
        if (from) {
            OA_UNROLL
            for (int j = 0; j < chunk_values; ++j) {
                raw.values[j] = narrow_f16(from[j]);
            }
        }
        *reinterpret_cast<Raw16 *>(to) = raw;
    }

    // scores: of tokens row() and row() + 8, each for this thread's two queries.
    OA_DEVICE void score(float (&scores)[4]) {
        const uint32_t token = lane_ % 8 + lane_ / 8 % 2 * 8;
        OA_UNROLL
        for (int step = 0; step < n_steps; ++step) {
            uint32_t k[4];
            b_.load_tiles(k, piece(0, token, uint32_t(step) * 2 + lane_ / 16));
            b_.multiply(scores, k, q_[step][0], q_[step][1]);
        }
    }

    // From scores to weights relative to the new maximum; what was added up so far becomes relative to it, too.
    OA_DEVICE void weigh(float (&scores)[4], uint32_t at, uint32_t end, bool is_new) {
        if (i_.softcap != 0.0f) {
            OA_UNROLL
            for (int s = 0; s < 4; ++s) {
                scores[s] = i_.softcap * Block::tanh(scores[s]);
            }
        }
        OA_UNROLL
        for (int s = 0; s < 4; ++s) {
            const uint32_t token = at + row() + uint32_t(s / 2) * 8, own = own_token_[s % 2];
            if (i_.max_bias > 0.0f && token <= own) { // llama.cpp's mask is in f16
                scores[s] -= b_.shared().slope[query(s % 2)] * widen_f16(narrow_f16(float(own - token)));
            }
            scores[s] = token < end && (!is_new || token <= own) ? scores[s] : -INFINITY;
        }
        OA_UNROLL
        for (int j = 0; j < 2; ++j) {
            float max = fmaxf(max_[j], fmaxf(scores[j], scores[2 + j]));
            OA_UNROLL
            for (int distance = 4; distance < 32; distance *= 2) {
                max = fmaxf(max, b_.across(max, distance));
            }
            const float base  = max == -INFINITY ? 0.0f : max; // nothing seen yet: all weights are exp(-inf)
            const float scale = Block::exp(max_[j] - base);
            max_[j]           = max;
            scores[j]         = Block::exp(scores[j] - base);
            scores[2 + j]     = Block::exp(scores[2 + j] - base);
            sum_[j]           = sum_[j] * scale + scores[j] + scores[2 + j];
            OA_UNROLL
            for (int step = 0; step < n_steps; ++step) {
                out_[step][j] *= scale;
                out_[step][2 + j] *= scale;
            }
        }
    }

    OA_DEVICE void add(const float (&weights)[4]) {
        const uint32_t first = b_.turn(pack(weights[0], weights[1]));
        const uint32_t last  = b_.turn(pack(weights[2], weights[3]));
        const uint32_t token = lane_ % 8 + lane_ / 16 * 8;
        OA_UNROLL
        for (int step = 0; step < n_steps; ++step) {
            uint32_t v[4];
            b_.load_tiles_turned(v, piece(1, token, uint32_t(step) * 2 + lane_ / 8 % 2));
            b_.multiply(out_[step], v, first, last);
        }
    }

    OA_DEVICE void save() {
        auto & shared = b_.shared();
        OA_UNROLL
        for (int j = 0; j < 2; ++j) {
            OA_UNROLL
            for (int distance = 4; distance < 32; distance *= 2) {
                sum_[j] += b_.across(sum_[j], distance);
            }
        }
        b_.sync(); // others' tiles are where this warp's values go
        OA_UNROLL
        for (int j = 0; j < 2; ++j) {
            const uint32_t at = warp_ * max_queries + query(j);
            if (row() == 0) {
                shared.max[at] = max_[j];
                shared.sum[at] = sum_[j];
            }
            OA_UNROLL
            for (int step = 0; step < n_steps; ++step) {
                shared.values[at * D + uint32_t(step) * 16 + row()]     = out_[step][j];
                shared.values[at * D + uint32_t(step) * 16 + row() + 8] = out_[step][2 + j];
            }
        }
        b_.sync();
    }

    Block &        b_;
    const Item &   i_;
    const uint32_t warp_, lane_, stride_;

    uint32_t q_[n_steps][2];
    float    out_[n_steps][4]; // of values row() and row() + 8 of a step, each for this thread's two queries
    float    max_[2], sum_[2]; // sum: of this thread's tokens
    uint32_t own_token_[2];
};

} // namespace oa::weave::cuda
