// From partial results to one: of the groups of lanes of a block, then of the splits of an output.
#pragma once

#include "attend.h"

namespace oa::weave::cuda {

template <class Block> class Merge {
  public:
    OA_DEVICE Merge(Block & block, ReceiverState & state) : b_(block), s_(state) {}

    // After attention: the item's part of an output, or the output if it is the last one. True: an output is written.
    // n_warps: that have a result each; 0: every group of lanes has one.
    OA_DEVICE bool run(const Item & item, uint32_t n_warps) {
        const auto &   shared   = b_.shared();
        const uint32_t width    = item.d_k > item.d_v ? item.d_k : item.d_v;
        const uint32_t padded   = width <= 64 ? 64 : width <= 128 ? 128 : 256; // as in attend_as()
        const int      n_lanes  = padded == 64  ? Block::template lanes<64>() :
                                  padded == 128 ? Block::template lanes<128>() :
                                                  Block::template lanes<256>();
        const uint32_t n_groups = n_warps > 0 ? n_warps : uint32_t(b_.n_threads() / n_lanes);
        const auto     group    = [&](uint32_t i, uint32_t g) {
            return Partial{ shared.max[i * max_queries + g], shared.sum[i * max_queries + g],
                            shared.values + (i * max_queries + g) * padded };
        };
        const auto output = [&](uint32_t g, uint32_t at, const Merged & total) { write_output(item, g, at, total); };
        if (item.n_splits == 1) {
            merge(item, n_groups, group, output);
            return true;
        }
        float * to = s_.partials + item.partial * partial_floats;
        merge(item, n_groups, group, [&](uint32_t g, uint32_t at, const Merged & total) {
            if (at == 0) {
                to[g]               = total.max;
                to[max_queries + g] = total.sum;
            }
            *reinterpret_cast<Four *>(to + 2 * max_queries + g * max_width + at) = total.values;
        });
        uint32_t * done = s_.merges + item.first_partial;
        if (b_.arrive(done) != item.n_splits - 1) {
            return false;
        }
        const float * first = s_.partials + item.first_partial * partial_floats;
        const auto    split = [&](uint32_t i, uint32_t g) {
            const float * from = first + i * partial_floats;
            return Partial{ from[g], from[max_queries + g], from + 2 * max_queries + g * max_width };
        };
        merge(item, item.n_splits, split, output);
        if (b_.thread() == 0) {
            *done = 0; // all splits have been here
        }
        return true;
    }

  private:
    struct alignas(16) Four {
        float values[4];
    };

    struct Partial {
        float         max, sum;
        const float * values;
    };

    struct Merged {
        float max, sum;
        Four  values;
    };

    // use(query, first of 4 values, what n partial results give together), for all of them, by all threads.
    template <class From, class Use> OA_DEVICE void merge(const Item & item, uint32_t n, From && from, Use && use) {
        const uint32_t per_query = item.d_v / 4;
        for (uint32_t i = uint32_t(b_.thread()); i < item.n_queries * per_query; i += uint32_t(b_.n_threads())) {
            const uint32_t g = i / per_query, at = i % per_query * 4;
            Merged         total = { -INFINITY, 0.0f, {} };
            OA_UNROLL_16
            for (uint32_t j = 0; j < n; ++j) {
                total.max = fmaxf(total.max, from(j, g).max);
            }
            // A result of no tokens has finite values, and its weight is 0. Without a branch for it, loads of several
            // results are under way at once.
            const float base = total.max == -INFINITY ? 0.0f : total.max;
            OA_UNROLL_16
            for (uint32_t j = 0; j < n; ++j) {
                const Partial partial = from(j, g);
                const float   weight  = Block::exp(partial.max - base);
                const Four    values  = *reinterpret_cast<const Four *>(partial.values + at);
                total.sum += weight * partial.sum;
                for (int k = 0; k < 4; ++k) {
                    total.values.values[k] += weight * values.values[k];
                }
            }
            use(g, at, total);
        }
    }

    static OA_DEVICE void write_output(const Item & item, uint32_t g, uint32_t at, const Merged & total) {
        const uint32_t head = g % item.n_heads;
        float          sum = total.sum, scale = 1.0f;
        if (item.sinks) {
            const float max = fmaxf(total.max, item.sinks[head]);
            scale           = Block::exp(total.max - max);
            sum             = sum * scale + Block::exp(item.sinks[head] - max);
        }
        scale /= sum; // the row's own token is among the tokens
        Four values = total.values;
        for (int k = 0; k < 4; ++k) {
            values.values[k] *= scale;
        }
        float * to                    = item.out + size_t(g / item.n_heads) * item.out_stride + head * item.d_v + at;
        *reinterpret_cast<Four *>(to) = values;
    }

    Block &         b_;
    ReceiverState & s_;
};

} // namespace oa::weave::cuda
