#include "thread_team.h"

#include "busy_cpus.h"
#include "clock.h"
#include "thread_waits.h"

#include <sched.h>
#include <strings.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <system_error>
#include <thread>
#include <vector>

namespace {

constexpr double barrier_spin_us = 2000;

// Between graphs threads spin for longer: another device may compute meanwhile. OpenMP's variable counts turns.
double idle_spin_us() {
    static const double us = [] {
        const char * turns = std::getenv("GOMP_SPINCOUNT");
        return turns ? std::atof(turns) / 100 : 5000.0; // 10 ns each
    }();
    return us;
}

// OpenMP has many ways to say where threads run. Who uses one has OpenMP's threads.
bool of_openmp() {
    static const bool wanted = [] {
        const char * given = std::getenv("OALLAMA_THREADS");
        const char * bind  = std::getenv("OMP_PROC_BIND");
        return (given && std::strcmp(given, "openmp") == 0) || (bind && strcasecmp(bind, "false") != 0) ||
               std::getenv("OMP_PLACES") || std::getenv("GOMP_CPU_AFFINITY");
    }();
    return wanted;
}

void count(int32_t & word, bool idle) {
    __atomic_fetch_add(&word, 1, __ATOMIC_SEQ_CST);
    oa_wake(&word, idle);
}

// OALLAMA_BIND_THREADS=1: thread i stays on the i-th of the CPUs that the process might use.
void bind(int ith) {
    struct Cpus {
        cpu_set_t set;
        bool      wanted = false;
    };
    static const Cpus cpus = [] {
        Cpus         own   = {};
        const char * given = std::getenv("OALLAMA_BIND_THREADS");
        own.wanted = given && std::strcmp(given, "1") == 0 && sched_getaffinity(0, sizeof(own.set), &own.set) == 0;
        return own;
    }();
    if (!cpus.wanted) {
        return;
    }
    int left = ith % CPU_COUNT(&cpus.set);
    for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
        if (CPU_ISSET(cpu, &cpus.set) && left-- == 0) {
            cpu_set_t one;
            CPU_ZERO(&one);
            CPU_SET(cpu, &one);
            sched_setaffinity(0, sizeof(one), &one);
            return;
        }
    }
}

class Team {
  public:
    ~Team() {
        forget_if_forked();
        for (auto & worker : workers) {
            worker->part = nullptr;
            count(worker->go, true);
            worker->thread.join();
        }
    }

    int size(int n_threads) {
        forget_if_forked();
        if (workers.empty()) {
            oa_all_cpus(); // before this thread has but one
            bind(0);
        }
        try {
            while (int(workers.size()) < n_threads - 1) {
                auto worker    = std::make_unique<Worker>();
                worker->thread = std::thread(&Team::work, this, std::ref(*worker), int(workers.size()) + 1);
                workers.push_back(std::move(worker));
            }
        } catch (const std::system_error &) { // no more threads for this process
        }
        return std::min(n_threads, int(workers.size()) + 1);
    }

    void run(int n_threads, oa_part part, void * job) {
        __atomic_store_n(&n_left, n_threads - 1, __ATOMIC_RELAXED);
        for (int i = 0; i < n_threads - 1; ++i) {
            workers[i]->part = part;
            workers[i]->job  = job;
            count(workers[i]->go, true);
        }
        part(job, 0);
        for (int32_t left; (left = __atomic_load_n(&n_left, __ATOMIC_ACQUIRE)) > 0;) {
            oa_wait_while(&n_left, left, barrier_spin_us, n_threads);
        }
    }

  private:
    struct alignas(64) Worker {
        int32_t     go   = 0;       // counts what there was to do
        oa_part     part = nullptr; // none: end
        void *      job  = nullptr;
        std::thread thread;
    };

    // Threads do not come along when a process forks.
    void forget_if_forked() {
        if (process == getpid()) {
            return;
        }
        for (auto & worker : workers) {
            (void) worker.release(); // its thread can be neither joined nor destroyed
        }
        workers.clear();
        oa_forget_waits();
        process = getpid();
    }

    void work(Worker & me, int ith) {
        bind(ith);
        for (int32_t seen = 0;; ++seen) {
            oa_wait_while(&me.go, seen, idle_spin_us(), 0);
            if (!me.part) {
                return;
            }
            me.part(me.job, ith);
            if (__atomic_sub_fetch(&n_left, 1, __ATOMIC_SEQ_CST) == 0) {
                oa_wake(&n_left, false);
            }
        }
    }

    alignas(64) int32_t n_left                   = 0; // threads that have not returned from their part
    pid_t                                process = getpid();
    std::vector<std::unique_ptr<Worker>> workers;
};

thread_local Team   team;
thread_local bool   keeps = false;
thread_local double ended = 0.0;

} // namespace

int oa_team_size(int n_threads) {
    return of_openmp() ? 0 : team.size(n_threads);
}

void oa_team_keep(bool all) {
    keeps = all;
}

bool oa_team_keeps() {
    return keeps;
}

void oa_team_run(int n_threads, oa_part part, void * job) {
    team.run(n_threads, part, job);
    ended = oa_now();
}

double oa_team_ended() {
    return ended;
}

bool oa_barrier(int32_t * n_arrived, int32_t * n_passed, int n_threads) {
    if (of_openmp()) {
        return false;
    }
    const int32_t before = __atomic_load_n(n_passed, __ATOMIC_RELAXED);
    if (__atomic_fetch_add(n_arrived, 1, __ATOMIC_ACQ_REL) < n_threads - 1) {
        oa_wait_while(n_passed, before, barrier_spin_us, n_threads);
    } else {
        __atomic_store_n(n_arrived, 0, __ATOMIC_RELAXED);
        count(*n_passed, false);
    }
    return true;
}
