// A block of device_sum.h on the CPU: one thread, in memory that processes or threads share.
#pragma once

#include "device_sum.h"

#include <chrono>
#include <sched.h>

class oa_cpu_block {
  public:
    oa_cpu_block(int block, int n_blocks) : block_(block), n_blocks_(n_blocks) {}

    int  block() const { return block_; }
    int  n_blocks() const { return n_blocks_; }
    int  thread() const { return 0; }
    int  n_threads() const { return 1; }
    void sync() const {}
    bool all(bool mine) const { return mine; }

    static uint64_t load_acquire(const uint64_t * word) { return __atomic_load_n(word, __ATOMIC_ACQUIRE); }
    static void     store_release(uint64_t * word, uint64_t value) { __atomic_store_n(word, value, __ATOMIC_RELEASE); }
    static uint32_t load_host(const uint32_t * word) { return __atomic_load_n(word, __ATOMIC_RELAXED); }
    static void     store_host(uint32_t * word, uint32_t value) { __atomic_store_n(word, value, __ATOMIC_RELAXED); }

    static uint64_t now() {
        const auto since_start = std::chrono::steady_clock::now().time_since_epoch();
        return uint64_t(std::chrono::duration_cast<std::chrono::nanoseconds>(since_start).count());
    }
    static void pause() { sched_yield(); }

  private:
    int block_, n_blocks_;
};
