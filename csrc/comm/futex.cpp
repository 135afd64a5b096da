#include "futex.h"

#include <climits>
#include <ctime>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

void oa_futex_wait(std::atomic<uint32_t> & word, uint32_t seen, uint32_t mask, double seconds) {
    timespec until; // with a bit set the kernel takes a time of day of the monotonic clock
    clock_gettime(CLOCK_MONOTONIC, &until);
    const long nanoseconds = until.tv_nsec + long(seconds * 1e9);
    until.tv_sec += nanoseconds / 1000000000;
    until.tv_nsec = nanoseconds % 1000000000;
    syscall(SYS_futex, &word, FUTEX_WAIT_BITSET, seen, &until, nullptr, mask);
}

void oa_futex_wake(std::atomic<uint32_t> & word, uint32_t mask) {
    syscall(SYS_futex, &word, FUTEX_WAKE_BITSET, INT_MAX, nullptr, nullptr, mask);
}
