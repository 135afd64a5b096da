// Sleeping on a word of shared memory until another process changes it (Linux).
#pragma once

#include <atomic>
#include <cstdint>

// Sleeps while `word` is `seen`, for at most `seconds`; may wake early.
void oa_futex_wait(std::atomic<uint32_t> & word, uint32_t seen, double seconds);

// Wakes all that sleep on it.
void oa_futex_wake(std::atomic<uint32_t> & word);
