// Threads that compute and wait together (csrc/base/thread_team.h), without ggml: team_threads MODE [ROUNDS]
//   sums      several teams at once: each thread reads after a barrier what the others wrote before it
//   unwaited  the same without the barriers, which must be found
//   one-cpu   two threads on one CPU; prints how often they slept
//   fork      a process that has a team forks; both go on
//   bound     prints the CPUs of each thread
//   free      prints how many CPUs nobody else needs, after a second
#include "busy_cpus.h"
#include "clock.h"
#include "thread_team.h"

#include <sched.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <thread>
#include <vector>

namespace {

struct Job {
    int                      n_threads;
    bool                     waits;
    std::vector<int>         values;
    int32_t                  n_arrived = 0, n_passed = 0;
    std::atomic<int>         n_wrong{ 0 };
    std::vector<std::string> cpus;

    Job(int n_threads, bool waits = true) : n_threads(n_threads), waits(waits), values(n_threads), cpus(n_threads) {}

    void wait() {
        if (waits) {
            oa_barrier(&n_arrived, &n_passed, n_threads);
        }
    }
};

void sum(void * given, int ith) {
    Job & job = *static_cast<Job *>(given);
    for (int step = 1; step <= 20; ++step) {
        job.values[ith] = step;
        job.wait();
        int total = 0;
        for (const int value : job.values) {
            total += value;
        }
        job.n_wrong += total != step * job.n_threads;
        job.wait();
    }
}

int sums(int rounds, bool waits) {
    std::atomic<int>         n_wrong{ 0 };
    std::vector<std::thread> masters;
    for (int seed = 0; seed < 3; ++seed) {
        masters.emplace_back([&, seed] {
            std::mt19937 random(seed);
            for (int i = 0; i < rounds; ++i) {
                Job job(oa_team_size(2 + int(random() % 5)), waits);
                oa_team_run(job.n_threads, sum, &job);
                n_wrong += job.n_wrong;
            }
        });
    }
    for (auto & master : masters) {
        master.join();
    }
    std::printf("%d wrong\n", n_wrong.load());
    return n_wrong > 0;
}

void stay_on_one_cpu() {
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(sched_getcpu(), &one);
    sched_setaffinity(0, sizeof(one), &one);
}

int one_cpu(int rounds) {
    for (int i = 0; i < rounds; ++i) {
        Job job(oa_team_size(2));
        oa_team_run(job.n_threads, sum, &job);
    }
    rusage usage = {};
    getrusage(RUSAGE_SELF, &usage);
    std::printf("%ld\n", usage.ru_nvcsw);
    return 0;
}

int forked() {
    const auto run = [] {
        Job job(oa_team_size(4));
        oa_team_run(job.n_threads, sum, &job);
        return job.n_wrong.load();
    };
    run();
    if (const pid_t child = fork()) {
        int status = 1;
        waitpid(child, &status, 0);
        return status + run();
    }
    std::exit(run()); // as a process ends: with the destructors of its threads
}

void ask(void * given, int ith) {
    cpu_set_t set;
    sched_getaffinity(0, sizeof(set), &set);
    for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
        if (CPU_ISSET(cpu, &set)) {
            static_cast<Job *>(given)->cpus[ith] += std::to_string(cpu) + " ";
        }
    }
}

int bound(int n_threads) {
    Job job(oa_team_size(n_threads));
    oa_team_run(job.n_threads, ask, &job);
    for (int i = 0; i < job.n_threads; ++i) {
        std::printf("%s\n", job.cpus[i].c_str());
    }
    return 0;
}

int free_cpus() {
    int found = 0;
    for (const double begin = oa_now(); oa_now() - begin < 1.0; usleep(2000)) {
        found = oa_free_cpus(oa_now(), 0.0, 1, 2).mostly;
    }
    std::printf("%d\n", found);
    return 0;
}

} // namespace

int main(int argc, char ** argv) {
    const std::string mode   = argc > 1 ? argv[1] : "";
    const int         rounds = argc > 2 ? std::atoi(argv[2]) : 200;
    if (mode == "one-cpu") {
        stay_on_one_cpu();
    }
    if (oa_team_size(2) == 0) {
        std::printf("OpenMP's threads are in use\n");
        return 3;
    }
    if (mode == "sums" || mode == "unwaited") {
        return sums(rounds, mode == "sums");
    }
    if (mode == "one-cpu") {
        return one_cpu(rounds);
    }
    if (mode == "fork") {
        return forked();
    }
    if (mode == "free") {
        return free_cpus();
    }
    if (mode == "bound") {
        return bound(rounds);
    }
    std::fprintf(stderr, "usage: team_threads sums|unwaited|one-cpu|fork|bound|free [ROUNDS]\n");
    return 2;
}
