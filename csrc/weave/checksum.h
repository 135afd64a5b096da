// A fast 64-bit checksum against torn and damaged slots; no protection against an attacker, who has to be the same
// user.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace oa::weave {

inline uint64_t checksum(const void * data, size_t nbytes) {
    constexpr size_t   n_lanes        = 4;
    constexpr uint64_t multiple       = 0x9e3779b97f4a7c15ull;
    uint64_t           lanes[n_lanes] = { nbytes, 1, 2, 3 };
    const char *       at             = static_cast<const char *>(data);
    for (; nbytes >= sizeof(lanes); nbytes -= sizeof(lanes), at += sizeof(lanes)) {
        uint64_t words[n_lanes];
        memcpy(words, at, sizeof(words));
        for (size_t i = 0; i < n_lanes; ++i) {
            lanes[i] = (lanes[i] ^ words[i]) * multiple;
            lanes[i] ^= lanes[i] >> 32;
        }
    }
    uint64_t sum = 0;
    for (uint64_t lane : lanes) {
        sum = (sum ^ lane) * multiple;
        sum ^= sum >> 29;
    }
    for (; nbytes > 0; --nbytes, ++at) {
        sum = (sum ^ uint8_t(*at)) * multiple;
        sum ^= sum >> 29;
    }
    return sum;
}

} // namespace oa::weave
