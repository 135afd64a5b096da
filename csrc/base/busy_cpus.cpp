#include "busy_cpus.h"

#include "clock.h"
#include "lasting_load.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <climits>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>

namespace {

constexpr double fresh_s     = 1e-3;  // how long the number of runnable threads is believed
constexpr double blink_s     = 75e-6; // what ends within four of them is the kernel's own work, or threads that spin
constexpr int    n_blinks    = 4;
constexpr double lately_s    = 50e-3;  // over which others are counted on the average
constexpr double over_s      = 10e-3;  // after which others that are gone are forgotten
constexpr double a_part      = 0.1;    // of a CPU that others need lastingly: more than this counts
constexpr double most_weight = 0.5;    // of one look, however long ago the last one was
constexpr double round_up    = 0.25;   // one that needs a CPU for three quarters of the time needs it
constexpr double look_s      = 200e-6; // how often a thread looks whether it lost its CPU
constexpr double lost_s      = 150e-6; // what is called losing it: to have waited for it so long,
constexpr double lost_share  = 0.02;   // and for such a share of the time since the last look
constexpr double busy_s      = 20e-3;  // how long the CPUs are called busy after that

// A short file of /proc that is read again and again.
class File {
  public:
    explicit File(const char * path) : path(path) {}

    ~File() {
        if (file >= 0 && process == getpid()) {
            close(file);
        }
    }

    // Its text, up to the next call; empty where it cannot be read.
    const char * read() {
        if (process != getpid()) { // a process that forked: a thread's file is that of the other process's thread
            process = getpid();    // and its number may be another file's by now
            file    = open(path, O_RDONLY | O_CLOEXEC);
        }
        const ssize_t n_read          = file >= 0 ? pread(file, text, sizeof(text) - 1, 0) : 0;
        text[n_read > 0 ? n_read : 0] = '\0';
        return text;
    }

  private:
    const char * path;
    pid_t        process   = 0;
    int          file      = -1;
    char         text[128] = {};
};

// 0 where the kernel does not say it.
int runnable_threads() {
    thread_local File file("/proc/loadavg"); // 0.52 0.58 0.59 3/602 29817
    const char *      slash = std::strchr(file.read(), '/');
    if (!slash) {
        return 0;
    }
    while (slash[-1] != ' ') {
        --slash;
    }
    return std::atoi(slash);
}

// Whether others had this thread's CPU since the thread last asked. The kernel's own work takes microseconds.
bool lost(double now) {
    thread_local File   file("/proc/thread-self/schedstat"); // ns on a CPU, ns of waiting for one, turns
    thread_local double asked = 0.0, waited = 0.0;
    const double        since = now - asked, before = waited;
    const bool          first = asked == 0.0;
    if (since < look_s) {
        return false;
    }
    const char * second = std::strchr(file.read(), ' ');
    asked               = now;
    waited              = second ? std::strtod(second, nullptr) * 1e-9 : 0.0;
    return !first && waited - before > std::max(lost_s, lost_share * since);
}

bool by_waiting(double now) {
    static std::atomic<double> busy_until{ 0.0 };
    if (lost(now)) {
        busy_until.store(now + busy_s, std::memory_order_relaxed);
    }
    return now < busy_until.load(std::memory_order_relaxed);
}

// The least of a few looks. One is enough if it finds no more than are known of, or few.
int others(int n_own, double known, int few) {
    int n_others = runnable_threads() - n_own;
    for (int i = 0; i < n_blinks && n_others > std::max(known + 0.5, double(few)); ++i) {
        const double begin = oa_now();
        while (oa_now() - begin < blink_s) {
            oa_pause();
        }
        n_others = std::min(n_others, runnable_threads() - n_own);
    }
    return std::max(n_others, 0);
}

} // namespace

int oa_all_cpus() {
    static const int n_cpus = [] {
        cpu_set_t set;
        const int own    = sched_getaffinity(0, sizeof(set), &set) == 0 ? CPU_COUNT(&set) : 0;
        const int online = int(sysconf(_SC_NPROCESSORS_ONLN));
        return own == online && runnable_threads() > 0 ? online : 0;
    }();
    return n_cpus;
}

oa_free oa_free_cpus(double now, double pause, int n_own, int n_wanted) {
    static std::atomic<double> asked{ 0.0 }, average{ 0.0 }, long_average{ 0.0 };
    if (oa_all_cpus() == 0) {
        return { INT_MAX, INT_MAX };
    }
    double n_others = average.load(std::memory_order_relaxed), n_long = long_average.load(std::memory_order_relaxed);
    const double since = now - asked.load(std::memory_order_relaxed);
    if (since > fresh_s) {
        asked.store(now, std::memory_order_relaxed);
        const int found = others(n_own, n_others, oa_all_cpus() - n_wanted);
        if (found < n_others) {
            n_others += std::min(1.0, since / over_s) * (found - n_others);
        } else if (pause > lately_s) { // who else has just worked may be about to stop
            n_others = std::max(n_others, std::min<double>(found, most_weight));
        } else {
            n_others += std::min(most_weight, since / lately_s) * (found - n_others);
        }
        n_long = oa_lasting_load(n_long, since, found);
        average.store(n_others, std::memory_order_relaxed);
        long_average.store(n_long, std::memory_order_relaxed);
    }
    const int mostly = oa_all_cpus() - int(n_others + round_up);
    return { mostly, std::min(mostly, oa_all_cpus() - int(std::ceil(n_long - a_part))) };
}

bool oa_cpus_are_busy(double now, int n_asleep) {
    static std::atomic<double> asked{ 0.0 };
    static std::atomic<bool>   busy{ false };
    if (oa_all_cpus() == 0) {
        return by_waiting(now);
    }
    if (now - asked.load(std::memory_order_relaxed) > fresh_s) {
        asked.store(now, std::memory_order_relaxed);
        busy.store(runnable_threads() + n_asleep > oa_all_cpus(), std::memory_order_relaxed);
    }
    return busy.load(std::memory_order_relaxed);
}
