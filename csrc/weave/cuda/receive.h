// The work of a task that a look (look.h) has opened: what the second launch of the receiver does.
//
//   work      blocks claim items one by one. Splits of an output are merged by the last of them to arrive.
//   finish    the last block that has written outputs publishes the result.
//   close     the last block to leave closes the task: another launch before the next look would do nothing.
//
// No block waits for another one, nor for the other side; so it does not matter how many blocks fit on the device at
// once, nor in which order they start. There is one task at most: the next one may need the tokens of this one, and
// there is no barrier of the grid. Launches of one receiver, looks and works, are in the order of streams and never
// overlap.
#pragma once

#include "attend_tiles.h"
#include "look.h"
#include "merge.h"

#include <type_traits>

namespace oa::weave::cuda {

template <class Block, class Rules = AllPollRules> class Work {
  public:
    OA_DEVICE Work(Block & block, ReceiverState & state) :
        b_(block), s_(state), o_(state.opened), look_(block, state), merge_(block, state) {}

    OA_DEVICE void run() {
        if (Block::load(&s_.is_open.value) == 0) { // all blocks alike: the last of them to leave closes the task
            return;
        }
        work();
        if (b_.arrive(&s_.left.value) == uint32_t(b_.n_blocks()) - 1 && b_.thread() == 0) {
            s_.next_item.value = s_.outputs.value = s_.left.value = 0;
            if (Rules::closes) {
                s_.is_open.value = 0;
            }
        }
    }

  private:
    OA_DEVICE void work() {
        uint32_t outputs = 0; // this block has written
        while (true) {
            const uint32_t item = b_.claim(&s_.next_item.value);
            if (item >= o_.n_items) {
                break;
            }
            outputs += compute(item) ? 1 : 0;
        }
        if (outputs > 0 && b_.arrive_system(&s_.outputs.value, outputs) + outputs == o_.n_outputs) {
            look_.finish(Status::ok, uint32_t(answer_nbytes(o_.task)));
        }
    }

    // One thread.
    OA_DEVICE void describe(uint32_t number, Item & item) const {
        uint32_t low = 0, high = o_.task.n_sequences; // the last sequence that begins at the item or before
        while (high - low > 1) {
            const uint32_t middle = (low + high) / 2;
            if (o_.rows[middle].first_item <= number) {
                low = middle;
            } else {
                high = middle;
            }
        }
        const OpenRows &   rows   = o_.rows[low];
        const AttendTask & t      = o_.task;
        const OpenTask &   shape  = look_.setup().shape;
        const AttendLayout layout = AttendLayout(t);
        const uint32_t     split  = (number - rows.first_item) % rows.n_splits;
        const uint32_t     output = (number - rows.first_item) / rows.n_splits;
        const uint32_t     tile = output / t.n_head_kv, head_kv = output % t.n_head_kv, per_kv = t.n_head / t.n_head_kv;
        const uint32_t     in_group = tile % o_.n_head_tiles * o_.tile_heads; // first of the heads that share head_kv
        const uint32_t     head     = head_kv * per_kv + in_group;
        const char *       from     = look_.channel().task(o_.slot, look_.setup().task_nbytes) + line;
        char *             to       = look_.channel().result(o_.slot, look_.setup().result_nbytes) + line;
        char * const       of_layer = s_.pool + t.layer * kv_layer_nbytes(shape);

        item.first_row     = tile / o_.n_head_tiles * o_.tile_rows;
        item.n_rows        = smaller(o_.tile_rows, rows.n_rows - item.first_row);
        item.n_heads       = smaller(o_.tile_heads, per_kv - in_group);
        item.n_queries     = item.n_rows * item.n_heads;
        item.first_head    = head;
        item.position      = rows.position;
        item.n_splits      = rows.n_splits;
        item.first_partial = rows.first_partial + output * rows.n_splits;
        item.partial       = item.first_partial + split;
        const uint32_t end = rows.position + item.first_row + item.n_rows; // of the tokens that these rows see
        item.begin         = rows.n_splits == 1 ? 0 : smaller(split * o_.split_tokens, end);
        item.end           = rows.n_splits == 1 ? end : smaller(item.begin + o_.split_tokens, end);
        item.stores        = in_group == 0;
        item.d_k           = t.d_k;
        item.d_v           = t.d_v;
        item.q_stride      = t.n_head * t.d_k;
        item.k_stride      = t.n_head_kv * t.d_k;
        item.v_stride      = t.n_head_kv * t.d_v;
        item.out_stride    = t.n_head * t.d_v;
        item.scale         = t.scale;
        item.softcap       = t.softcap;
        item.max_bias      = t.max_bias;
        item.block_nbytes  = kv_block_nbytes(shape);
        item.n_pool_blocks = look_.setup().n_pool_blocks;
        item.pages         = s_.pages + size_t(rows.place) * s_.pages_per_place;
        item.pool_k        = of_layer + head_kv * block_tokens * kv_token_nbytes(shape.k_type, t.d_k);
        item.pool_v        = of_layer + block_tokens * kv_token_nbytes(shape.k_type, shape.k_width) +
                      head_kv * block_tokens * kv_token_nbytes(shape.v_type, t.d_v);
        const size_t row = rows.first_row;
        item.new_k       = floats(from + layout.k) + row * item.k_stride + head_kv * t.d_k;
        item.new_v       = floats(from + layout.v) + row * item.v_stride + head_kv * t.d_v;
        item.q           = floats(from + layout.q) + (row + item.first_row) * item.q_stride + head * t.d_k;
        item.sinks       = t.has_sinks ? floats(from + layout.sinks) + head : nullptr;
        item.out = reinterpret_cast<float *>(to) + (row + item.first_row) * item.out_stride + size_t(head) * t.d_v;
    }

    static OA_DEVICE const float * floats(const char * at) { return reinterpret_cast<const float *>(at); }
    static OA_DEVICE uint32_t      smaller(uint32_t a, uint32_t b) { return a < b ? a : b; }

    // True: an output has been written.
    OA_DEVICE bool compute(uint32_t number) {
        Item & item = b_.shared().item;
        if (b_.thread() == 0) {
            describe(number, item);
        }
        b_.sync();
        if (item.max_bias > 0.0f) {
            for (uint32_t g = uint32_t(b_.thread()); g < item.n_queries; g += uint32_t(b_.n_threads())) {
                const uint32_t head  = item.first_head + g % item.n_heads;
                b_.shared().slope[g] = alibi_slope(item.max_bias, o_.task.n_head, head);
            }
            b_.sync();
        }
        switch (look_.setup().shape.k_type) {
            case kv_f16: attend_as<F16>(item); break;
            case kv_bf16: attend_as<Bf16>(item); break;
            case kv_q8_0: attend_as<Q8_0>(item); break;
            default: attend_as<F32>(item); break;
        }
        return merge_.run(item, has_tiles(item) ? uint32_t(b_.n_threads()) / 32 : 0);
    }

    OA_DEVICE bool has_tiles(const Item & item) const {
        return b_.has_tiles() && look_.setup().shape.k_type == kv_f16 && item.d_k == item.d_v &&
               (item.d_k == 64 || item.d_k == 128);
    }

    template <class Format> OA_DEVICE void attend_as(const Item & item) {
        store_pieces<Format>(b_, item.pool_k, item.new_k, item.k_stride, item.d_k);
        store_pieces<Format>(b_, item.pool_v, item.new_v, item.v_stride, item.d_v);
        const uint32_t width = item.d_k > item.d_v ? item.d_k : item.d_v;
        if (width <= 64) {
            attend_width<Format, 64>(item);
        } else if (width <= 128) {
            attend_width<Format, 128>(item);
        } else {
            attend_width<Format, 256>(item);
        }
    }

    // The item that holds a row stores its token, if that is one of the item's tokens.
    template <class Format>
    static OA_NOINLINE OA_DEVICE void store_pieces(Block & b, char * pool, const float * values, uint32_t stride,
                                                   uint32_t d) {
        const Item &   item     = b.shared().item;
        const uint32_t n_pieces = item.stores ? d / Format::unit : 0;
        for (uint32_t at = uint32_t(b.thread()); at < item.n_rows * n_pieces; at += uint32_t(b.n_threads())) {
            const uint32_t row = item.first_row + at / n_pieces, token = item.position + row;
            if (token >= item.begin && token < item.end) {
                const uint32_t block = Block::load(item.pages + token / block_tokens);
                if (block < item.n_pool_blocks) {
                    Format::store(pool + block * item.block_nbytes, token % block_tokens, d, at % n_pieces,
                                  values + size_t(row) * stride);
                }
            }
        }
    }

    template <class Format, int D> OA_DEVICE void attend_width(const Item & item) {
        if constexpr (std::is_same<Format, F16>::value && D <= 128) {
            if (has_tiles(item)) {
                attend_tiles<D>(b_);
                return;
            }
        }
        if (item.n_queries <= 2) {
            attend<Format, D, 2>(b_);
        } else if (item.n_queries <= 4) {
            attend<Format, D, 4>(b_);
        } else {
            attend<Format, D, 8>(b_);
        }
    }

    template <class Format, int D, int n_queries> static OA_NOINLINE OA_DEVICE void attend(Block & b) {
        Attention<Format, D, n_queries, Block>(b, b.shared().item).run();
    }

    template <int D> static OA_NOINLINE OA_DEVICE void attend_tiles(Block & b) {
        TiledAttention<D, Block>(b, b.shared().item).run();
    }

    Block &            b_;
    ReceiverState &    s_;
    OpenedTask &       o_;
    Look<Block, Rules> look_;
    Merge<Block>       merge_;
};

} // namespace oa::weave::cuda
