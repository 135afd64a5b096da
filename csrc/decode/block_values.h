// Numbers in blocks of quantised weights, for all instruction sets with F16C. Everything is local to the file that
// includes it.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace {

template <class T> T value_at(const void * p) {
    T value;
    memcpy(&value, p, sizeof(value));
    return value;
}

inline float half_at(const void * p) {
    return _cvtsh_ss(value_at<uint16_t>(p));
}

} // namespace
