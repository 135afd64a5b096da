// Threads that compute the parts of a graph, in place of OpenMP's. C and C++. They wait as thread_waits.h says.
#pragma once

#include <stdbool.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef void (*oa_part)(void * job, int ith);

// How many threads, the caller among them, `oa_team_run` can use of n_threads: fewer if the system gives no more. 0 if
// OpenMP's are wanted: OALLAMA_THREADS=openmp, or a variable of OpenMP that says where threads run.
//
// Each thread that calls it has threads of its own, which end with it. OALLAMA_BIND_THREADS=1: each stays on one CPU.
int oa_team_size(int n_threads);

// When this thread's last job ended, in seconds of oa_now(); 0 before the first one.
double oa_team_ended(void);

// Whether graphs that this thread computes have all of their threads, although other programs need the CPUs: for
// measurements, which would be of something else.
void oa_team_keep(bool all);
bool oa_team_keeps(void);

// Calls part(job, i) for i from 0 to n_threads - 1, each in a thread, 0 in the caller's; returns when all have
// returned. n_threads: at most what `oa_team_size` said to this thread last.
void oa_team_run(int n_threads, oa_part part, void * job);

// Returns when n_threads threads are here; false at once if OpenMP's threads are in use. Two words that begin with 0
// and are nobody else's: how many threads have arrived, and how often all had.
bool oa_barrier(int32_t * n_arrived, int32_t * n_passed, int n_threads);

#ifdef __cplusplus
}

// There for as long as this thread measures.
struct oa_all_threads {
    oa_all_threads() { oa_team_keep(true); }
    ~oa_all_threads() { oa_team_keep(false); }

    oa_all_threads(const oa_all_threads &)             = delete;
    oa_all_threads & operator=(const oa_all_threads &) = delete;
};
#endif
