#include "thread_waits.h"

#include "busy_cpus.h"
#include "clock.h"

#include <algorithm>
#include <atomic>
#include <climits>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace {

constexpr double wake_s  = 3e-6;  // what waking takes for each thread that sleeps
constexpr double look_s  = 50e-6; // how long a thread spins before it asks whether the CPUs are busy
constexpr int    n_spins = 32;    // about half a microsecond between two looks at the clock

// Of all threads of the process. Mostly nobody sleeps between two operators, and then nobody writes to the first line.
struct State {
    alignas(64) std::atomic<int> n_asleep{ 0 }; // that compute
    std::atomic<bool> busy{ false };
    alignas(64) std::atomic<int> n_idle_asleep{ 0 };
    std::atomic<int> n_idle_spinners{ 0 };
} state;

bool changed(const int32_t * word, int32_t seen) {
    return __atomic_load_n(word, __ATOMIC_ACQUIRE) != seen;
}

bool changed_soon(const int32_t * word, int32_t seen) {
    for (int i = 0; i < n_spins; ++i) {
        if (changed(word, seen)) {
            return true;
        }
        oa_pause();
    }
    return false;
}

bool is_busy(double now) {
    const bool busy = oa_cpus_are_busy(now, state.n_asleep.load(std::memory_order_relaxed));
    if (busy != state.busy.load(std::memory_order_relaxed)) {
        state.busy.store(busy, std::memory_order_relaxed);
    }
    return busy;
}

bool spin(const int32_t * word, int32_t seen, double most_s, double busy_s) {
    if (changed_soon(word, seen)) {
        return true;
    }
    const double begin = oa_now();
    if (state.busy.load(std::memory_order_relaxed) && is_busy(begin)) {
        most_s = busy_s;
    }
    for (double now = begin, looked = begin; now - begin < most_s; now = oa_now()) {
        if (now - looked > look_s && most_s > busy_s) {
            if (is_busy(now)) {
                return false;
            }
            looked = now;
        }
        if (changed_soon(word, seen)) {
            return true;
        }
    }
    return false;
}

} // namespace

void oa_wait_while(const int32_t * word, int32_t seen, double spin_us, int n_threads) {
    const bool   idle = n_threads == 0;
    const double busy = wake_s * n_threads, quiet = std::max(spin_us * 1e-6, 4 * busy);
    if (idle) {
        state.n_idle_spinners.fetch_add(1, std::memory_order_relaxed);
    }
    const bool came = spin(word, seen, quiet, busy);
    if (idle) {
        state.n_idle_spinners.fetch_sub(1, std::memory_order_relaxed);
    }
    if (came) {
        return;
    }
    std::atomic<int> & n_asleep = idle ? state.n_idle_asleep : state.n_asleep;
    n_asleep.fetch_add(1);
    while (!changed(word, seen)) {
        syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
    }
    n_asleep.fetch_sub(1);
}

void oa_wake(const int32_t * word, bool idle) {
    if ((idle ? state.n_idle_asleep : state.n_asleep).load() > 0) {
        syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
    }
}

int oa_n_idle_spinners() {
    return state.n_idle_spinners.load(std::memory_order_relaxed);
}

void oa_forget_waits() {
    state.n_asleep = state.n_idle_asleep = state.n_idle_spinners = 0;
}
