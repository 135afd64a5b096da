// Sleeping on a word of shared memory until another process changes it (Linux).
#pragma once

#include <atomic>
#include <cstdint>

// Sleeps while `word` is `seen`, for at most `seconds`; may wake early. Only wakers with a bit of `mask` end it.
void oa_futex_wait(std::atomic<uint32_t> & word, uint32_t seen, uint32_t mask, double seconds);

// Wakes all that sleep with a bit of `mask`.
void oa_futex_wake(std::atomic<uint32_t> & word, uint32_t mask);
