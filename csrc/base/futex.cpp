#include "futex.h"

#include <climits>
#include <ctime>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

void oa_futex_wait(std::atomic<uint32_t> & word, uint32_t seen, double seconds) {
    const auto     whole = time_t(seconds);
    const timespec most  = { whole, long((seconds - double(whole)) * 1e9) };
    syscall(SYS_futex, &word, FUTEX_WAIT, seen, &most, nullptr, 0);
}

void oa_futex_wake(std::atomic<uint32_t> & word) {
    syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}
