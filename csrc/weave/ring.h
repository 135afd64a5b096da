// How the two sides of a channel hand each other tasks and results (protocol.h), and nothing else: the same code runs
// on shared memory and in the model checker (tests/native/weave_model.cpp), which tries every interleaving.
//
// Memory gives load_acquire, store_release (of words by offset; 32 or 64 bits). Rules name the checks; tests remove
// them one by one and must find out.
#pragma once

#include "protocol.h"

namespace oa::weave {

struct AllRules {
    static constexpr bool credit   = true; // no task into a slot whose result is not there yet
    static constexpr bool accepted = true; // no task before the receiver has seen the epoch
    static constexpr bool epoch    = true; // no result for a task of another epoch
    static constexpr bool wrap     = true; // numbers are compared by their difference
};

template <class Memory, class Rules = AllRules> class SenderRing {
  public:
    OA_HD SenderRing(Memory & memory, uint32_t n_slots) : memory_(memory), n_slots_(n_slots) {}

    // Begin an epoch, whose first task is base + 1. What the last epoch left undone is void.
    OA_HD void attach(uint64_t epoch, uint32_t base) {
        epoch_ = epoch;
        tail_  = base;
        memory_.template store_release<uint32_t>(word::base, base);
        memory_.template store_release<uint32_t>(word::tail, base);
        memory_.template store_release<uint64_t>(word::epoch, epoch);
    }

    // Whether the receiver serves this epoch. Until then no slot may be touched: it may still work on the last one.
    OA_HD bool accepted() const {
        return !Rules::accepted || memory_.template load_acquire<uint64_t>(word::accepted) == epoch_;
    }

    // Whether the slot of the next task is free.
    OA_HD bool has_credit() const { return !Rules::credit || completed(tail_ + 1 - n_slots_); }

    OA_HD uint32_t next() const { return tail_ + 1; }
    OA_HD uint32_t slot(uint32_t number) const { return number % n_slots_; }
    OA_HD uint64_t epoch() const { return epoch_; }

    // The task in the slot of next() is complete.
    OA_HD void publish() { memory_.template store_release<uint32_t>(word::tail, ++tail_); }

    // Say again what is so, in case that somebody wrote over it.
    OA_HD void restore() { memory_.template store_release<uint32_t>(word::tail, tail_); }

    // Whether the result of a task is there.
    OA_HD bool completed(uint32_t number) const {
        const uint32_t done = memory_.template load_acquire<uint32_t>(word::done);
        return Rules::wrap ? reached(done, number) : done >= number;
    }

  private:
    Memory & memory_;
    uint32_t n_slots_;
    uint32_t tail_  = 0;
    uint64_t epoch_ = 0;
};

// Calls of one receiver do not overlap.
template <class Memory, class Rules = AllRules> class ReceiverRing {
  public:
    OA_HD ReceiverRing(Memory & memory, uint32_t n_slots) : memory_(memory), n_slots_(n_slots) {}

    // Whether a sender has begun another epoch; accept() then serves it, and all that was there before is void.
    OA_HD bool is_new_epoch() const { return memory_.template load_acquire<uint64_t>(word::epoch) != epoch_; }

    OA_HD void accept() {
        epoch_ = memory_.template load_acquire<uint64_t>(word::epoch);
        done_  = memory_.template load_acquire<uint32_t>(word::base);
        memory_.template store_release<uint32_t>(word::done, done_);
        memory_.template store_release<uint64_t>(word::accepted, epoch_);
    }

    // Whether a task waits, in the slot of next().
    OA_HD bool has_task() const {
        const uint32_t tail = memory_.template load_acquire<uint32_t>(word::tail);
        return Rules::wrap ? waits(tail, done_, n_slots_) : tail > done_;
    }

    // Say again what is so, in case that somebody wrote over it.
    OA_HD void restore() {
        memory_.template store_release<uint32_t>(word::done, done_);
        memory_.template store_release<uint64_t>(word::accepted, epoch_);
    }

    OA_HD uint32_t next() const { return done_ + 1; }
    OA_HD uint32_t slot(uint32_t number) const { return number % n_slots_; }
    OA_HD uint64_t epoch() const { return epoch_; }

    // Whether a task with such a header is the next one of this epoch.
    OA_HD bool is_next(uint64_t epoch, uint32_t number) const {
        return !Rules::epoch || (epoch == epoch_ && number == next());
    }

    // The result in the slot of next() is complete.
    OA_HD void finish() { memory_.template store_release<uint32_t>(word::done, ++done_); }

  private:
    Memory & memory_;
    uint32_t n_slots_;
    uint32_t done_  = 0;
    uint64_t epoch_ = 0;
};

} // namespace oa::weave
