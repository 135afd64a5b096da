// Whether other programs need the CPUs of this process.
#pragma once

// True where threads are ready to run that find no CPU. now: seconds of oa_now(). n_asleep: threads of this process
// that wait for others of it in sleep, and would run if they did not sleep.
//
// Where the process may use all CPUs, the kernel's number of runnable threads says it. Else each thread asks how long
// it was ready to run while others had its CPU, and what one has found counts for all of the process for a while.
bool oa_cpus_are_busy(double now, int n_asleep);

// CPUs that no other thread has needed lately, for threads that compute together; large numbers where the kernel does
// not say it, or this process may not use all CPUs.
struct oa_free {
    int mostly; // for most of the last 50 ms
    int wholly; // fewer than that where others needed a part of one more, in the last half second
};

// now: seconds of oa_now(). pause: seconds in which the caller computed nothing. n_own: threads of this process that
// run now and are to compute, the caller among them. n_wanted: if so many are free anyway, one look is enough.
oa_free oa_free_cpus(double now, double pause, int n_own, int n_wanted);

// Of the machine; 0 if this process may not use all of them. What the thread that asks first may use counts.
int oa_all_cpus();
