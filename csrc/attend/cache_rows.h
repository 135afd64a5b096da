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

// From so many values to the next, all lines of a row are met.
template <class T> constexpr int64_t values_of_a_line() {
    int64_t n = T::block > 16 ? T::block : 16;
    while (bytes_of<T>(2 * n) <= 64) {
        n *= 2;
    }
    return n;
}

} // namespace
