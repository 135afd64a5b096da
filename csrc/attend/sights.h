// What a query token sees of a block of the cache.
#pragma once

#include <cstdint>

namespace {

enum class Sight : char { none, all, some };

constexpr uint16_t minus_infinity = 0xfc00; // as half

Sight sight_of(const uint16_t * mask, int64_t n) {
    uint16_t seen = 0, added = 0;
    for (int64_t i = 0; i < n; ++i) {
        seen |= uint16_t(mask[i] ^ minus_infinity);
        added |= uint16_t(mask[i] & 0x7fff);
    }
    return !seen ? Sight::none : !added ? Sight::all : Sight::some;
}

} // namespace
