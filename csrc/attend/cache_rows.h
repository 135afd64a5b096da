// Rows of a cache in memory: their bytes, and how far ahead they are fetched.
#pragma once

#include <cstddef>
#include <cstdint>

namespace {

constexpr size_t ahead = 8; // tokens; chosen by trial on one machine

inline void prefetch(const char * p) {
    __builtin_prefetch(p, 0, 2);
}

inline void prefetch(const char * p, int64_t nbytes) {
    for (int64_t at = 0; at < nbytes; at += 64) {
        prefetch(p + at);
    }
}

template <class T> constexpr int64_t bytes_of(int64_t n_values) {
    return n_values / T::block * T::bytes;
}

// The bytes of a row that are fetched at once: a line, or less where a block of values is shorter.
template <class T> constexpr int64_t fetched_at_once = T::block > 1 ? T::bytes : 64;

} // namespace
