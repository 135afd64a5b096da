#include "wire.h"

#include "half.h"
#include "simd.h"
#include "sum.h"

#include <algorithm>
#include <cstring>
#include <vector>

namespace {

// Values decoded at a time: one block per source stays in the first-level cache.
constexpr size_t piece = 16 * OA_Q8_VALUES;

uint32_t largest_bits(const float * from) {
    uint32_t largest = 0;
    for (size_t i = 0; i < OA_Q8_VALUES; ++i) {
        const uint32_t bits = oa_f32_bits(from[i]) & 0x7fffffff; // ordered as the magnitudes are, NaN on top
        largest             = std::max(largest, bits);
    }
    return largest;
}

// Up to the next bf16, so that no quotient is beyond 127.
uint16_t scale_of(uint32_t largest) {
    const uint32_t bits = oa_f32_bits(oa_bits_f32(largest) / 127.0f);
    return uint16_t(bits >= 0x7f800000 ? bits >> 16 | (bits > 0x7f800000 ? 0x40 : 0) : (bits + 0xffff) >> 16);
}

OA_SIMD void encode_block(const float * from, char * to) {
    const uint16_t scale = scale_of(largest_bits(from));
    const float    d     = oa_bf16_f32(scale);
    std::memcpy(to, &scale, sizeof(scale));
    int8_t * q = reinterpret_cast<int8_t *>(to + sizeof(scale));
    // Adding and taking away 1.5 * 2^23 rounds to the nearest integer, ties to even.
    constexpr float shift = 12582912.0f;
    const float     safe  = d > 0 && d < oa_bits_f32(0x7f800000) ? d : oa_bits_f32(0x7f000000);
    for (size_t i = 0; i < OA_Q8_VALUES; ++i) {
        const float quotient = from[i] / safe + shift;
        q[i]                 = int8_t(oa_f32_bits(quotient) & 0xff);
    }
}

OA_SIMD void decode_block(const char * from, float * to) {
    uint16_t scale;
    std::memcpy(&scale, from, sizeof(scale));
    const float    d = oa_bf16_f32(scale);
    const int8_t * q = reinterpret_cast<const int8_t *>(from + sizeof(scale));
    // Infinity must not become a finite value: times any byte it is infinite or NaN, and adding its zero product
    // makes that NaN.
    const float poison = d * 0.0f;
    for (size_t i = 0; i < OA_Q8_VALUES; ++i) {
        to[i] = float(q[i]) * d + poison;
    }
}

} // namespace

void oa_q8_encode(const float * from, size_t n, char * to) {
    for (; n >= OA_Q8_VALUES; n -= OA_Q8_VALUES, from += OA_Q8_VALUES, to += OA_Q8_BYTES) {
        encode_block(from, to);
    }
    if (n > 0) {
        float rest[OA_Q8_VALUES] = {};
        std::copy(from, from + n, rest);
        encode_block(rest, to);
    }
}

void oa_q8_decode(const char * from, size_t n, float * to) {
    for (; n >= OA_Q8_VALUES; n -= OA_Q8_VALUES, to += OA_Q8_VALUES, from += OA_Q8_BYTES) {
        decode_block(from, to);
    }
    if (n > 0) {
        float rest[OA_Q8_VALUES];
        decode_block(from, rest);
        std::copy(rest, rest + n, to);
    }
}

size_t oa_wire::size(size_t n) const {
    return format == OA_WIRE_Q8 ? (n + OA_Q8_VALUES - 1) / OA_Q8_VALUES * OA_Q8_BYTES : n * oa_dtype_size(dtype);
}

const char * oa_wire::pack(const char * values, size_t n, char * scratch) const {
    if (format == OA_WIRE_NATIVE) {
        return values;
    }
    oa_q8_encode(reinterpret_cast<const float *>(values), n, scratch);
    return scratch;
}

void oa_wire::unpack(const char * wire, size_t n, char * values) const {
    if (format == OA_WIRE_Q8) {
        oa_q8_decode(wire, n, reinterpret_cast<float *>(values));
    } else if (wire != values) {
        std::memcpy(values, wire, n * oa_dtype_size(dtype));
    }
}

void oa_wire::sum(char * to, const char * const * wires, int n_wires, size_t n) const {
    if (format == OA_WIRE_NATIVE) {
        oa_sum(dtype, to, reinterpret_cast<const void * const *>(wires), n_wires, n);
        return;
    }
    std::vector<float>        values(size_t(n_wires) * piece);
    std::vector<const void *> sources(static_cast<size_t>(n_wires));
    for (size_t at = 0; at < n; at += piece) {
        const size_t m = std::min(piece, n - at);
        for (size_t w = 0; w < sources.size(); ++w) {
            oa_q8_decode(wires[w] + at / OA_Q8_VALUES * OA_Q8_BYTES, m, &values[w * piece]);
            sources[w] = &values[w * piece];
        }
        oa_sum(OA_F32, reinterpret_cast<float *>(to) + at, sources.data(), n_wires, m);
    }
}
