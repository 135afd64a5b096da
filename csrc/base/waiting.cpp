#include "waiting.h"

#include "clock.h"

#include <algorithm>
#include <atomic>
#include <climits>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace {

constexpr double busy_s      = 20e-3;  // how long all sleep at once after a thread lost its CPU
constexpr double busy_most_s = 0.3;    // and at most, if that happens again and again
constexpr double look_s      = 200e-6; // how often a thread that spins looks whether it did
constexpr double lost_s      = 150e-6; // what is called losing it: to have waited for it so long,
constexpr double lost_share  = 0.02;   // and for such a share of the time since the last look
constexpr int    n_spins     = 32;     // about a microsecond between two looks at the clock

// Of all threads of the process. Mostly nobody sleeps, and then nobody writes here.
struct alignas(64) State {
    std::atomic<int>    n_asleep{ 0 };
    std::atomic<double> busy_until{ 0.0 };

    // A thread lost its CPU. Each time that it happens again soon after all spun again, they sleep twice as long.
    void lost(double now) {
        const double until = busy_until.load(std::memory_order_relaxed),
                     span  = busy_span.load(std::memory_order_relaxed);
        if (now > until) {
            busy_span.store(now < until + span ? std::min(2 * span, busy_most_s) : busy_s, std::memory_order_relaxed);
        }
        busy_until.store(now + busy_span.load(std::memory_order_relaxed), std::memory_order_relaxed);
    }

  private:
    std::atomic<double> busy_span{ busy_s };
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

// How long this thread has waited for a CPU, by the kernel's count.
class RunDelay {
  public:
    ~RunDelay() { close(); }

    // Seconds since the thread began; 0 where the kernel does not count them.
    double read() {
        if (process != getpid()) { // the file of a thread of the process that forked
            close();
            process = getpid();
            file    = open("/proc/thread-self/schedstat", O_RDONLY | O_CLOEXEC);
        }
        char          text[96]; // nanoseconds on a CPU, nanoseconds of waiting, turns
        const ssize_t n_read          = file >= 0 ? pread(file, text, sizeof(text) - 1, 0) : 0;
        text[n_read > 0 ? n_read : 0] = '\0';
        const char * second           = std::strchr(text, ' ');
        return second ? std::strtod(second, nullptr) * 1e-9 : 0.0;
    }

  private:
    void close() {
        if (file >= 0) {
            ::close(file);
        }
    }

    pid_t process = 0;
    int   file    = -1;
};

// Notes whether others had this thread's CPU since the thread last looked. The kernel's own work takes microseconds.
void look(double now) {
    thread_local RunDelay delay;
    thread_local double   looked = now, waited = delay.read();
    const double          before = waited, since = now - looked;
    if (since < look_s) {
        return;
    }
    looked = now;
    waited = delay.read();
    if (waited - before > std::max(lost_s, lost_share * since)) {
        state.lost(now);
    }
}

bool spin(const int32_t * word, int32_t seen, double seconds) {
    if (changed_soon(word, seen)) {
        return true;
    }
    const double begin = oa_now();
    for (double now = begin, looked = begin; now - begin < seconds; now = oa_now()) {
        if (now - looked > look_s) {
            look(now);
            looked = now;
        }
        if (now < state.busy_until.load(std::memory_order_relaxed)) {
            return false;
        }
        if (changed_soon(word, seen)) {
            return true;
        }
    }
    return false;
}

} // namespace

void oa_wait_while(const int32_t * word, int32_t seen, double spin_us) {
    if (spin(word, seen, spin_us * 1e-6)) {
        return;
    }
    state.n_asleep.fetch_add(1);
    while (!changed(word, seen)) {
        syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
    }
    state.n_asleep.fetch_sub(1);
}

void oa_wake(const int32_t * word) {
    if (state.n_asleep.load() > 0) {
        syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
        look(oa_now());
    }
}
