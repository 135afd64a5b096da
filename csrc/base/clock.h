// The monotonic clock, and how a thread that spins tells its core so.
#pragma once

#include <chrono>

// Seconds since some moment in the past.
inline double oa_now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

inline void oa_pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}
