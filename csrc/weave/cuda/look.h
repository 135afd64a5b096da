// The beginning and the end of a task: one snapshot of what waits, the checks, the cut into items; its result is
// published. A look is a launch of one block, which does it with all of its threads unless it says otherwise; the work
// (receive.h) is the next launch, and only a look that has opened a task gives it any.
//
// A look takes nothing: until a task's result is published each look finds that task again, as the first one did. So a
// look whose work never came, since a launch failed, loses none.
//
// What the sender writes is read once, into the receiver's own memory, and only then looked at: whatever it does
// meanwhile, all threads come to the same end, and no size or position is used that was not checked.
#pragma once

#include "../ring.h"
#include "receiver_state.h"

#include <new>

namespace oa::weave::cuda {

// Tests take them away one by one and must find out.
struct AllPollRules {
    static constexpr bool generation = true; // a place that another sequence has now is not read
    static constexpr bool room       = true; // no tokens beyond what is reserved
    static constexpr bool epoch      = true; // a task of another epoch or number is refused
    static constexpr bool says       = true; // a look that opens no task says so, whatever the last one has opened
    static constexpr bool closes     = true; // work that is done is not done again
};

template <class Block, class Rules> class Look {
    using Channel = Duplex<Block>;
    using Ring    = ReceiverRing<Channel>;

  public:
    OA_DEVICE Look(Block & block, ReceiverState & state) : b_(block), s_(state), o_(state.opened) {}

    // Whether a task is open now, with items of attention. Others have been answered.
    OA_DEVICE bool look() {
        const bool found = open();
        if (b_.thread() == 0) {
            if (found || Rules::says) {
                s_.is_open.value = found ? 1 : 0;
            }
            if (s_.adopted_number != s_.number) { // the work before, with the setup before, has ended
                s_.adopted_number = s_.number;
                Block::store_release(s_.adopted, s_.number);
            }
        }
        return found;
    }

    // One block, while the device has nothing else to do: until there may be a task, the host wants something (`stop`,
    // in its memory), or so many nanoseconds are over.
    OA_DEVICE void watch(uint64_t patience, const uint32_t * stop) const {
        if (b_.thread() != 0) {
            return;
        }
        const uint64_t since = Block::now();
        for (uint32_t spins = 0; !may_have_task() && Block::now() - since < patience; ++spins) {
            if (spins % 16 == 0 && Block::load(stop) != 0) { // over PCIe: seldom
                return;
            }
            Block::pause();
        }
    }

    // What this block has seen is published.
    OA_DEVICE void finish(Status status, uint32_t nbytes) {
        if (b_.thread() != 0) {
            return;
        }
        ResultHeader header = {};
        header.epoch        = ring().epoch();
        header.number       = ring().next();
        header.status       = status;
        header.nbytes       = status == Status::ok ? nbytes : 0;
        header.checksum     = header_checksum(header);
        *reinterpret_cast<ResultHeader *>(channel().result(o_.slot, setup().result_nbytes)) = header;
        ++s_.n_tasks;
        s_.n_refused += status != Status::ok;
        ring().finish();
        channel().template store_release<uint32_t>(word::heartbeat, s_.n_looks);
    }

    OA_DEVICE Channel &     channel() const { return *reinterpret_cast<Channel *>(s_.channel); }
    OA_DEVICE const Setup & setup() const { return s_.setups[s_.number % 2]; }

  private:
    static_assert(sizeof(Ring) <= sizeof(ReceiverState::ring) && sizeof(Channel) <= sizeof(ReceiverState::channel),
                  "the ring fits");

    OA_DEVICE Ring & ring() const { return *reinterpret_cast<Ring *>(s_.ring); }

    OA_NOINLINE OA_DEVICE bool open() {
        if (b_.thread() == 0) {
            b_.shared().status = has_task() ? 1 : 0;
        }
        b_.sync();
        if (b_.shared().status == 0) {
            return false;
        }
        const Status status = read_task();
        if (status == Status::ok && o_.n_items > 0) {
            return true;
        }
        finish(status, o_.answer_nbytes);
        return false;
    }

    // One thread: without opening anything.
    OA_DEVICE bool may_have_task() const {
        if (Block::load_acquire(&s_.setup_number.value) != s_.number) {
            return true;
        }
        if (setup().epoch == 0) {
            return false;
        }
        return ring().epoch() == setup().epoch ? ring().has_task() : ring().is_new_epoch();
    }

    // One thread.
    OA_DEVICE bool has_task() {
        ++s_.n_looks;
        const uint32_t wanted = Block::load_acquire(&s_.setup_number.value);
        if (wanted != s_.number) {
            s_.number = wanted;
            new (s_.channel) Channel(setup().inbox, setup().outbox);
            new (s_.ring) Ring(channel(), setup().n_slots);
        }
        if (setup().epoch == 0) {
            return false;
        }
        if (ring().epoch() != setup().epoch) {
            if (channel().template load_acquire<uint64_t>(word::epoch) != setup().epoch) {
                return false;
            }
            ring().accept();
        }
        if (ring().epoch() != setup().epoch || !ring().has_task()) {
            return false;
        }
        o_.slot    = ring().slot(ring().next());
        o_.n_items = o_.answer_nbytes = 0;
        o_.header = *reinterpret_cast<const TaskHeader *>(channel().task(o_.slot, setup().task_nbytes));
        return true;
    }

    // All threads. Ok: the task is open, with items of attention, or (ping) has been done.
    OA_DEVICE Status read_task() {
        const TaskHeader & header = o_.header; // the only copy that is looked at: all threads come to the same end
        const char *       from   = channel().task(o_.slot, setup().task_nbytes) + line;
        const bool sound = header.nbytes <= setup().task_nbytes - line && header.checksum == header_checksum(header);
        if ((Rules::epoch && !ring().is_next(header.epoch, header.number)) || !sound) {
            return Status::malformed;
        }
        if (header.kind == Kind::ping) {
            return answer(from, header.nbytes);
        }
        if (header.kind != Kind::attend || header.nbytes < sizeof(AttendTask)) {
            return Status::malformed;
        }
        b_.sync(); // threads read, now one writes
        if (b_.thread() == 0) {
            o_.task            = *reinterpret_cast<const AttendTask *>(from);
            b_.shared().status = uint32_t(is_sound(header.nbytes) ? Status::ok : Status::malformed);
        }
        b_.sync();
        if (b_.shared().status != uint32_t(Status::ok)) {
            return Status::malformed;
        }
        const Status status = read_rows(from + AttendLayout(o_.task).rows);
        if (status == Status::ok && b_.thread() == 0) {
            cut();
        }
        b_.sync();
        return status;
    }

    OA_DEVICE Status answer(const char * from, uint32_t nbytes) {
        if (nbytes > setup().result_nbytes - line) {
            return Status::malformed;
        }
        char * to = channel().result(o_.slot, setup().result_nbytes) + line;
        for (uint32_t at = uint32_t(b_.thread()); at < nbytes; at += uint32_t(b_.n_threads())) {
            to[at] = char(~from[at]);
        }
        b_.sync();
        if (b_.thread() == 0) {
            o_.answer_nbytes = nbytes;
        }
        b_.sync();
        return Status::ok;
    }

    OA_DEVICE bool is_sound(uint32_t nbytes) const {
        const AttendTask & t     = o_.task;
        const OpenTask &   shape = setup().shape;
        const uint32_t     unit  = shape.k_type == kv_q8_0 ? 32 : chunk_values;
        return oa::weave::is_sound(t, max_width, unit) && fits_shape(t, shape) &&
               fits_slots(t, nbytes, setup().result_nbytes - line);
    }

    OA_DEVICE Status read_rows(const char * from) {
        b_.sync(); // all have read the status
        for (uint32_t i = uint32_t(b_.thread()); i < o_.task.n_sequences; i += uint32_t(b_.n_threads())) {
            const auto *       all    = reinterpret_cast<const SequenceRows *>(from);
            const SequenceRows given  = all[i];
            const Status       status = is_again(all, i) ? Status::malformed : check(given);
            o_.rows[i].place          = given.handle.place;
            o_.rows[i].position       = given.position;
            o_.rows[i].n_rows         = given.n_rows;
            if (status != Status::ok) {
                b_.shared().status = uint32_t(status); // of several, any
            }
        }
        b_.sync();
        if (b_.thread() == 0 && b_.shared().status == uint32_t(Status::ok)) {
            uint64_t first = 0;
            for (uint32_t i = 0; i < o_.task.n_sequences; ++i) {
                o_.rows[i].first_row = uint32_t(first);
                first += o_.rows[i].n_rows;
            }
            if (first != o_.task.n_rows) {
                b_.shared().status = uint32_t(Status::malformed);
            }
        }
        b_.sync();
        return Status(b_.shared().status);
    }

    OA_DEVICE Status check(const SequenceRows & given) const {
        const Handle handle = given.handle;
        if (handle.place >= max_places || handle.generation == 0) {
            return Status::unknown_sequence;
        }
        const Place & place = s_.places[handle.place];
        if (Rules::generation && Block::load(&place.generation) != handle.generation) {
            return Status::unknown_sequence;
        }
        return check_rows(given, o_.task.n_rows, Rules::room ? Block::load(&place.n_tokens) : UINT64_MAX);
    }

    // One thread: tiles of rows and heads, and splits of tokens, so many that every block has items enough.
    OA_DEVICE void cut() {
        const AttendTask & t      = o_.task;
        const uint32_t     per_kv = t.n_head / t.n_head_kv;
        o_.tile_heads             = per_kv < max_queries ? per_kv : max_queries;
        o_.tile_rows              = max_queries / o_.tile_heads;
        o_.n_head_tiles           = (per_kv + o_.tile_heads - 1) / o_.tile_heads;
        uint64_t units            = 0; // blocks of tokens that items read
        uint32_t n_outputs        = 0; // of all sequences; not in memory, which would be read again and again
        for (uint32_t i = 0; i < t.n_sequences; ++i) {
            const uint32_t of_rows = n_tiles(o_.rows[i]) * t.n_head_kv;
            units += uint64_t(of_rows) * n_units(o_.rows[i]);
            n_outputs += of_rows;
        }
        o_.n_outputs      = n_outputs;
        o_.split_tokens   = unit_of(units) * block_tokens;
        o_.n_items        = 0;
        uint32_t partials = 0;
        for (uint32_t i = 0; i < t.n_sequences; ++i) {
            OpenRows &     rows     = o_.rows[i];
            const uint32_t of_rows  = n_tiles(rows) * t.n_head_kv;
            const uint32_t n_tokens = rows.position + rows.n_rows;
            rows.n_splits           = (n_tokens + o_.split_tokens - 1) / o_.split_tokens;
            rows.first_item         = o_.n_items;
            rows.first_partial      = partials;
            if (rows.n_splits > 1) {
                if (partials + of_rows * rows.n_splits <= s_.max_partials) {
                    partials += of_rows * rows.n_splits;
                } else {
                    rows.n_splits = 1;
                }
            }
            o_.n_items += of_rows * rows.n_splits;
        }
    }

    // Blocks of tokens of a split. Partial results of four items for every block of the grid have room.
    OA_DEVICE uint32_t unit_of(uint64_t units) const {
        const uint32_t n_blocks = s_.max_partials / 4;
        // One item for each block, if hardly any block goes without: what comes before and after an item's tokens
        // takes as long for the next one.
        if (n_blocks > 0 && o_.n_outputs <= n_blocks / 2) {
            uint32_t one = above(units, n_blocks);
            uint64_t n   = n_items(one);
            if (n > n_blocks) { // since sequences end within a split
                one = above(one * n, n_blocks);
                n   = n_items(one);
            }
            if (one >= 2 && n <= n_blocks && n * 8 >= n_blocks * 7) {
                return one;
            }
        }
        const uint32_t two = above(units, s_.max_partials / 2); // for each, so that they end together
        return two < 2 ? 2 : two;
    }

    OA_DEVICE uint64_t n_items(uint32_t unit) const {
        uint64_t n = 0;
        for (uint32_t i = 0; i < o_.task.n_sequences; ++i) {
            const uint32_t n_splits = (n_units(o_.rows[i]) + unit - 1) / unit;
            n += uint64_t(n_tiles(o_.rows[i]) * o_.task.n_head_kv) * n_splits;
        }
        return n;
    }

    // Rounded up; no split is longer than 2^20 blocks.
    static OA_DEVICE uint32_t above(uint64_t units, uint32_t by) {
        const uint64_t unit = (units + by - 1) / by;
        return unit < 1u << 20 ? uint32_t(unit) : 1u << 20;
    }

    OA_DEVICE uint32_t n_tiles(const OpenRows & rows) const {
        return (rows.n_rows + o_.tile_rows - 1) / o_.tile_rows * o_.n_head_tiles;
    }

    OA_DEVICE uint32_t n_units(const OpenRows & rows) const {
        return (rows.position + rows.n_rows + block_tokens - 1) / block_tokens;
    }

    Block &         b_;
    ReceiverState & s_;
    OpenedTask &    o_;
};

} // namespace oa::weave::cuda
