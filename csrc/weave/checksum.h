// A fast 64-bit checksum against torn and damaged slots; no protection against an attacker, who has to be the same
// user. It is always taken of private memory, before what is there is copied into a slot or after it was copied out of
// one: else a slot that changes in between would go unnoticed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace oa::weave {

inline uint64_t checksum(const void * data, size_t nbytes, uint64_t seed = 0) {
    constexpr size_t   n_lanes        = 4;
    constexpr uint64_t multiple       = 0x9e3779b97f4a7c15ull;
    uint64_t           lanes[n_lanes] = { nbytes, seed, 2, 3 };
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

// Of the header of a task or a result, its own checksum left out, and of the payload.
template <class AnyHeader> uint64_t checksum(AnyHeader header, const void * payload) {
    header.checksum = 0;
    return checksum(payload, header.nbytes, checksum(&header, sizeof(header)));
}

} // namespace oa::weave
