// What other work took from a measurement. Known on Linux only: elsewhere all numbers are 0.
#pragma once

// Seconds that the threads of this process were ready to run while something else had their CPUs, all together, since
// they began. Counted in nanoseconds per thread (/proc/self/task/*/schedstat).
double oa_waited_s();

// CPU seconds that others than this process took since the machine started. Counted in ticks of 10 ms (/proc/stat);
// what a hypervisor took is in it. A process that this one started is no other where it works for it.
double oa_others_s(bool children_are_ours);
