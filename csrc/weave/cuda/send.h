// The sender's launches: rows of a layer leave, a bounded wait, results are fetched. The host takes no part in between,
// so all of it may be captured; results come in the order of tasks.
//
// Nothing here traps or waits without an end. The first failure is written to the host's report, and from then on every
// launch of this sender returns at once, the fetches with zeros: a dead receiver costs one patience, not one per layer.
#pragma once

#include "../ring.h"
#include "sender_state.h"

#include <new>

namespace oa::weave::cuda {

// Memory of a block.
struct SendShared {
    uint32_t claimed; // of the Block
    uint32_t first, count;
};

template <class Block> class Send {
    using Channel = Duplex<Block>;
    using Ring    = SenderRing<Channel>;

    static constexpr uint32_t ping_nbytes = 2048;

  public:
    OA_DEVICE Send(Block & block, SenderState & state) : b_(block), s_(state) {}

    // One block. The first launch.
    OA_DEVICE void attach() {
        if (b_.thread() == 0) {
            new (s_.channel) Channel(s_.inbox, s_.outbox);
            new (s_.ring) Ring(channel(), s_.n_slots);
            s_.fetched = s_.base;
            ring().attach(s_.epoch, s_.base);
        }
    }

    // One block: until the receiver serves this epoch.
    OA_DEVICE void await_accepted() {
        if (b_.thread() == 0 && !s_.failed) {
            await([&] { return ring().accepted(); });
        }
    }

    // One block: a task that comes back inverted. await_result() and check_ping() follow it.
    OA_DEVICE void ping() {
        if (s_.failed) {
            return;
        }
        char * slot = channel().task(ring().slot(ring().next()), s_.task_nbytes);
        for (uint32_t at = uint32_t(b_.thread()); at < ping_nbytes; at += uint32_t(b_.n_threads())) {
            slot[line + at] = pattern(at);
        }
        b_.sync();
        if (b_.thread() == 0) {
            publish(slot, Kind::ping, ping_nbytes);
        }
    }

    OA_DEVICE void check_ping() {
        if (s_.failed) {
            return;
        }
        const char * from = result();
        bool         same = true;
        for (uint32_t at = 0; b_.thread() == 0 && at < ping_nbytes; ++at) {
            same = same && from[at] == char(~pattern(at));
        }
        if (!same) {
            fail(Failure::no_way, Status::ok);
        }
        if (b_.thread() == 0) {
            ++s_.fetched;
        }
    }

    OA_DEVICE void send(const SendCall & call) {
        const uint32_t number = ring().next();
        if (s_.failed) {
            return;
        }
        if (number - s_.fetched > s_.n_slots) {
            if (b_.block() == 0 && b_.thread() == 0) {
                fail(Failure::lost_count, Status::ok);
            }
            return;
        }
        AttendTask task = call.task;
        find_sequences(call);
        const uint32_t first = b_.shared().first;
        task.n_sequences     = b_.shared().count;
        task.has_sinks       = call.sinks != nullptr;
        const AttendLayout layout(task);
        char *             slot = channel().task(ring().slot(number), s_.task_nbytes);
        char *             to   = slot + line;
        copy(to + layout.q, call.q, call.first, task.n_rows, call.q_stride, task.n_head * task.d_k);
        copy(to + layout.k, call.k, call.first, task.n_rows, call.k_stride, task.n_head_kv * task.d_k);
        copy(to + layout.v, call.v, call.first, task.n_rows, call.v_stride, task.n_head_kv * task.d_v);
        if (b_.block() == 0) {
            describe(call, task, first, to, layout);
        }
        if (b_.arrive_system(&s_.arrived, 1) == uint32_t(b_.n_blocks()) - 1 && b_.thread() == 0) {
            s_.arrived = 0;
            publish(slot, Kind::attend, uint32_t(layout.nbytes));
        }
    }

    // One block, of a warp: until the oldest task that was not fetched is done, and its answer sound.
    OA_DEVICE void await_result(uint32_t nbytes) {
        if (b_.thread() != 0 || s_.failed) {
            return;
        }
        const uint32_t number = s_.fetched + 1;
        if (!await([&] { return ring().completed(number); })) {
            return;
        }
        const auto header = *reinterpret_cast<const ResultHeader *>(result() - line);
        if (!answers(header, s_.epoch, number, nbytes) || header.checksum != header_checksum(header)) {
            fail(Failure::damaged, Status::ok);
        } else if (header.status != Status::ok) {
            fail(Failure::refused, header.status);
        }
    }

    static constexpr OA_HD uint32_t ping_answer() { return ping_nbytes; }

    OA_DEVICE void fetch(const FetchCall & call) {
        const float *  from  = reinterpret_cast<const float *>(result());
        const uint32_t n     = uint32_t(b_.n_blocks() * b_.n_threads());
        const bool     there = s_.failed == 0;
        for (uint32_t at = uint32_t(b_.block() * b_.n_threads() + b_.thread()); at < call.n_floats / 4; at += n) {
            reinterpret_cast<Four *>(call.out)[at] = there ? reinterpret_cast<const Four *>(from)[at] : Four{};
        }
        if (b_.arrive(&s_.arrived) == uint32_t(b_.n_blocks()) - 1 && b_.thread() == 0) {
            s_.arrived = 0;
            ++s_.fetched;
        }
    }

  private:
    static_assert(sizeof(Ring) <= sizeof(SenderState::ring) && sizeof(Channel) <= sizeof(SenderState::channel),
                  "the ring fits");

    struct alignas(16) Four {
        float values[4];
    };

    OA_DEVICE Channel & channel() const { return *reinterpret_cast<Channel *>(s_.channel); }
    OA_DEVICE Ring &    ring() const { return *reinterpret_cast<Ring *>(s_.ring); }

    // Of the oldest task that was not fetched.
    OA_DEVICE const char * result() const {
        return channel().result(ring().slot(s_.fetched + 1), s_.result_nbytes) + line;
    }

    OA_DEVICE char pattern(uint32_t at) const { return char(s_.epoch + at * 7); }

    OA_DEVICE void fail(Failure why, Status status) {
        s_.failed         = 1;
        s_.report->status = uint32_t(status);
        s_.report->number = s_.fetched + 1;
        Block::store_release(&s_.report->failure, uint32_t(why));
    }

    // One thread.
    template <class Done> OA_DEVICE bool await(Done && done) {
        const uint64_t since = Block::now();
        bool           came  = true;
        for (uint32_t spins = 1; !done(); ++spins) {
            if (spins % 1024 == 0 && Block::load(&s_.report->abort) != 0) { // over PCIe: seldom
                fail(Failure::aborted, Status::ok);
                came = false;
                break;
            }
            if (Block::now() - since > s_.patience) {
                fail(Failure::late, Status::ok);
                came = false;
                break;
            }
            Block::pause();
        }
        s_.waited += Block::now() - since;
        s_.report->waited = s_.waited;
        return came;
    }

    // Sequences with rows among those of the call: in the block's memory, the first one and how many.
    OA_DEVICE void find_sequences(const SendCall & call) {
        const SendPlan & plan = s_.plan;
        const uint32_t   end  = call.first + call.task.n_rows;
        for (uint32_t i = uint32_t(b_.thread()); i < plan.n_sequences; i += uint32_t(b_.n_threads())) {
            const uint32_t begins = plan.first_row[i], ends = begins + plan.rows[i].n_rows;
            if (begins <= call.first && call.first < ends) {
                b_.shared().first = i;
            }
        }
        b_.sync();
        const uint32_t first = b_.shared().first;
        for (uint32_t i = uint32_t(b_.thread()); i < plan.n_sequences; i += uint32_t(b_.n_threads())) {
            const uint32_t begins = plan.first_row[i], ends = begins + plan.rows[i].n_rows;
            if (begins < end && end <= ends) {
                b_.shared().count = i - first + 1;
            }
        }
        b_.sync();
    }

    // One block: all of a task but its rows.
    OA_DEVICE void describe(const SendCall & call, const AttendTask & task, uint32_t first, char * to,
                            const AttendLayout & layout) {
        if (b_.thread() == 0) {
            *reinterpret_cast<AttendTask *>(to) = task;
        }
        const uint32_t end  = call.first + task.n_rows;
        auto *         rows = reinterpret_cast<SequenceRows *>(to + layout.rows);
        for (uint32_t i = uint32_t(b_.thread()); i < task.n_sequences; i += uint32_t(b_.n_threads())) {
            const uint32_t     begins = s_.plan.first_row[first + i];
            const SequenceRows given  = s_.plan.rows[first + i];
            const uint32_t     from   = begins > call.first ? begins : call.first;
            const uint32_t     until  = begins + given.n_rows < end ? begins + given.n_rows : end;
            rows[i]                   = { given.handle, given.position + (from - begins), until - from };
        }
        for (uint32_t i = uint32_t(b_.thread()); task.has_sinks && i < task.n_head; i += uint32_t(b_.n_threads())) {
            reinterpret_cast<float *>(to + layout.sinks)[i] = call.sinks[i];
        }
    }

    // Rows of `width` floats from `first` on: every thread of the grid some.
    OA_DEVICE void copy(char * to, const float * from, uint32_t first, uint32_t n_rows, size_t stride, uint32_t width) {
        const uint32_t per_row = width / 4, n = uint32_t(b_.n_blocks() * b_.n_threads());
        for (uint32_t at = uint32_t(b_.block() * b_.n_threads() + b_.thread()); at < n_rows * per_row; at += n) {
            const float * row                = from + (first + at / per_row) * stride;
            reinterpret_cast<Four *>(to)[at] = reinterpret_cast<const Four *>(row)[at % per_row];
        }
    }

    // One thread, after all that the payload is made of.
    OA_DEVICE void publish(char * slot, Kind kind, uint32_t nbytes) {
        TaskHeader header                     = {};
        header.epoch                          = s_.epoch;
        header.number                         = ring().next();
        header.kind                           = kind;
        header.nbytes                         = nbytes;
        header.checksum                       = header_checksum(header);
        *reinterpret_cast<TaskHeader *>(slot) = header;
        ring().publish();
    }

    Block &       b_;
    SenderState & s_;
};

} // namespace oa::weave::cuda
