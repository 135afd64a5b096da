// How threads that compute together wait for each other.
//
// A thread that waits spins, because waking takes longer than most waits. But where other programs need the CPUs too,
// the thread it waits for may have lost its own. Then spinning takes time from whoever should run, and the kernel gives
// this process less of it later. So threads spin for as long as waking takes where there are more runnable threads than
// CPUs, and longer where there are not.
#pragma once

#include <cstdint>

// Returns when `word` is no longer `seen`. Spins for at most `spin_us` microseconds, then sleeps. n_threads: how many
// compute together, the caller among them; 0 if the caller has nothing to do yet.
void oa_wait_while(const int32_t * word, int32_t seen, double spin_us, int n_threads);

// Call it after `word` has changed, by the thread that changed it, which changed it in sequential consistency. idle:
// whether those that may sleep there had nothing to do.
void oa_wake(const int32_t * word, bool idle);

// How many threads of this process spin because they have nothing to do yet.
int oa_n_idle_spinners();

// In a process that forked: no other thread waits.
void oa_forget_waits();
