// How long the threads of this process were ready to run while other work had their CPUs: the measure of a disturbed
// sample. Linux counts it in nanoseconds per thread (/proc/self/task/*/schedstat); elsewhere nothing is known.
#pragma once

// Seconds, of all threads of this process together, since they began. 0 where the system does not tell.
double oa_waited_s();
