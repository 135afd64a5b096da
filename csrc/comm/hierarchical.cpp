// The loop of a rank through input, sum, (LM) wire and output of its chunks: whatever can be done next is done, and
// only when nothing can does the rank wait.
//
// An area is a ring of slots of one chunk. A slot is written again when its reader has counted the chunk that was
// there: the input slots when all have summed it, the sum and result slots when all have taken it out.
#include "algorithms.h"

#include "comm_error.h"
#include "sum.h"

#include <algorithm>
#include <cstring>
#include <sched.h>

namespace {

// Bytes of a ring of several chunks. More of it makes the ranks work on memory instead of their cache, less lets the
// wire run dry when a rank is away (8 ranks on 2 cores of an AMD EPYC: 16 MiB over 10 Gbit took 15 % longer with 4 MiB
// with two hosts, and 30 % longer with 512 KiB with four).
constexpr size_t ring = 2 << 20;

class oa_rank_loop {
  public:
    oa_rank_loop(const oa_hierarchy & hierarchy, const oa_operation & op, char * buffer) :
        shm_(hierarchy.shm), net_(hierarchy.net), watch_(hierarchy.watch), schedule_(hierarchy.schedule), op_(op),
        buffer_(buffer), base_(shm_.counted(OA_OUTPUT, shm_.index())), width_(oa_dtype_size(oa_dtype(op.dtype))),
        n_chunks_(std::max<uint64_t>(1, (op.n + op.chunk - 1) / op.chunk)),
        n_slots_(std::max<uint64_t>(1, std::min<uint64_t>(shm_.area() / (op.chunk * width_),
                                                          std::max<uint64_t>(2, ring / (op.chunk * width_))))),
        alone_(shm_.n_ranks() == 1), last_(hierarchy.n_hosts == 1 ? OA_SUM : OA_RESULT) {
        if (alone_) {
            n_in_ = n_summed_ = n_chunks_; // its values are the host's sum
        } else if (!op.slices && !shm_.is_lm()) {
            n_summed_ = n_chunks_;
        }
    }

    void run() {
        shm_.announce(op_);
        watch_.begin(op_);
        while (n_out_ < n_chunks_) {
            const uint32_t now = shm_.now();
            // The wire first, and again after every piece of work.
            const bool moved = wire() || sum() || input() || output();
            if (moved) {
                watch_.progress();
            } else {
                wait(now);
            }
        }
    }

  private:
    struct range {
        size_t begin, end;
    };

    size_t size_of(uint64_t chunk) const { return size_t(std::min<uint64_t>(op_.chunk, op_.n - chunk * op_.chunk)); }
    size_t slot(uint64_t chunk) const { return size_t(chunk % n_slots_ * op_.chunk) * width_; }
    char * own(uint64_t chunk) const { return buffer_ + size_t(chunk * op_.chunk) * width_; }

    bool reached(oa_shm_event event, uint64_t chunks) { return shm_.reached(event, base_ + chunks); }
    // Whoever `event` is about has finished with what was in the slot of `chunk`.
    bool vacant(oa_shm_event event, uint64_t chunk) { return chunk < n_slots_ || reached(event, chunk + 1 - n_slots_); }

    // What rank `index` of the host sums of a chunk; whole cache lines.
    range slice(int index, size_t n) const {
        if (!op_.slices) {
            return index == shm_.lm() ? range{ 0, n } : range{ 0, 0 };
        }
        const size_t part = (n + size_t(shm_.n_ranks()) * 32 - 1) / (size_t(shm_.n_ranks()) * 32) * 32;
        return { std::min(n, size_t(index) * part), std::min(n, size_t(index + 1) * part) };
    }

    bool input() {
        if (n_in_ == n_chunks_ || !vacant(OA_SUM, n_in_)) {
            return false;
        }
        const size_t n    = size_of(n_in_);
        const range  mine = slice(shm_.index(), n); // this rank reads it where it is
        char *       to   = shm_.input(shm_.index()) + slot(n_in_);
        const char * from = own(n_in_);
        std::memcpy(to, from, mine.begin * width_);
        std::memcpy(to + mine.end * width_, from + mine.end * width_, (n - mine.end) * width_);
        shm_.count(OA_INPUT, base_ + ++n_in_);
        return true;
    }

    bool sum() {
        if (n_summed_ == n_chunks_ || !reached(OA_INPUT, n_summed_ + 1) || !vacant(OA_OUTPUT, n_summed_)) {
            return false;
        }
        if (n_summed_ == 0) {
            compare_operations();
        }
        const range               mine = slice(shm_.index(), size_of(n_summed_));
        const size_t              at   = mine.begin * width_;
        std::vector<const void *> values;
        for (int i = 0; i < shm_.n_ranks(); ++i) {
            values.push_back((i == shm_.index() ? own(n_summed_) : shm_.input(i) + slot(n_summed_)) + at);
        }
        oa_sum(oa_dtype(op_.dtype), shm_.sums() + slot(n_summed_) + at, values.data(), shm_.n_ranks(),
               mine.end - mine.begin);
        shm_.count(OA_SUM, base_ + ++n_summed_);
        return true;
    }

    void compare_operations() const {
        for (int i = 0; i < shm_.n_ranks(); ++i) {
            const oa_operation theirs = shm_.announced(i, op_.number);
            if (!(theirs == op_)) {
                throw oa_comm_error("the ranks of a host are not at the same operation: expected " + op_.print() +
                                    ", got " + theirs.print());
            }
        }
    }

    bool summed(uint64_t chunk) { return alone_ || reached(OA_SUM, chunk + 1); }

    bool wire() {
        if (!schedule_) {
            return false;
        }
        const int finished = schedule_->n_finished();
        bool      moved    = false;
        while (opened() < n_chunks_ && opened() < uint64_t(finished + schedule_->depth()) &&
               vacant(OA_OUTPUT, opened())) {
            const uint64_t chunk = opened();
            schedule_->open(shm_.results() + slot(chunk), size_of(chunk));
            moved = true;
        }
        while (started() < opened() && summed(started())) {
            const uint64_t chunk = started();
            schedule_->start(alone_ ? own(chunk) : shm_.sums() + slot(chunk));
            moved = true;
        }
        moved |= schedule_->poll();
        if (schedule_->n_finished() > finished) {
            shm_.count(OA_RESULT, base_ + uint64_t(schedule_->n_finished()));
        }
        return moved;
    }

    uint64_t opened() const { return uint64_t(schedule_->n_opened()); }
    uint64_t started() const { return uint64_t(schedule_->n_started()); }

    bool output() {
        if (n_out_ == n_chunks_ || !reached(last_, n_out_ + 1)) {
            return false;
        }
        const char * from = last_ == OA_SUM ? shm_.sums() : shm_.results();
        std::memcpy(own(n_out_), from + slot(n_out_), size_of(n_out_) * width_);
        shm_.count(OA_OUTPUT, base_ + ++n_out_);
        return true;
    }

    void wait(uint32_t now) {
        watch_.look([this](int index) { return behind(index); });
        const bool on_wire = schedule_ && uint64_t(schedule_->n_finished()) < started();
        if (on_wire) {
            net_.check_timeout(watch_.waited());
            sched_yield();
            return;
        }
        shm_.sleep(now);
    }

    // The rank `index` owes something that this rank's next output needs.
    bool behind(int index) {
        const auto owes = [&](oa_shm_event event, uint64_t chunks) {
            return shm_.counted(event, index) < base_ + chunks;
        };
        const bool is_lm = index == shm_.lm();
        return (!alone_ && owes(OA_INPUT, n_out_ + 1)) ||
               (!alone_ && (op_.slices || is_lm) && owes(OA_SUM, n_out_ + 1)) ||
               (is_lm && last_ == OA_RESULT && owes(OA_RESULT, n_out_ + 1)) ||
               (n_out_ >= n_slots_ && owes(OA_OUTPUT, n_out_ + 1 - n_slots_));
    }

    oa_intra_host &      shm_;
    oa_inter_host &      net_;
    oa_watch &           watch_;
    oa_schedule * const  schedule_;
    const oa_operation & op_;
    char * const         buffer_;
    const uint64_t       base_; // chunks of all operations before this one
    const size_t         width_;
    const uint64_t       n_chunks_, n_slots_;
    const bool           alone_; // the only rank of its host
    const oa_shm_event   last_;  // what the ranks wait for to take a chunk out
    uint64_t             n_in_ = 0, n_summed_ = 0, n_out_ = 0;
};

} // namespace

void oa_run_hierarchical(const oa_hierarchy & hierarchy, const oa_operation & op, char * buffer) {
    oa_rank_loop(hierarchy, op, buffer).run();
}
