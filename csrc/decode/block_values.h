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

// Scales of MXFP4 by their byte e: half of 2^(e - 127), since values are looked up as twice what they are.
struct HalvesOfPowers {
    float of[256] = { 0x1p-128f };

    constexpr HalvesOfPowers() {
        for (int e = 1; e < 256; ++e) {
            of[e] = 2.0f * of[e - 1];
        }
    }
};

constexpr HalvesOfPowers halves_of_powers;

} // namespace
