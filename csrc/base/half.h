// f16 and bf16 to f32 and back, rounding to nearest even. Without branches, so that loops over them are vectorised;
// integer arithmetic, so that every machine gives the same bits (a NaN stays a NaN, its payload does not matter), GPUs
// among them unless they are told to flush subnormals (nvcc -ftz=true, -use_fast_math).
#pragma once

#include <cstdint>
#include <cstring>

// Before functions that CUDA kernels and CPU code share.
#ifdef __CUDACC__
#define OA_DEVICE __device__
#else
#define OA_DEVICE
#endif

OA_DEVICE inline float oa_bits_f32(uint32_t bits) {
    float f;
    std::memcpy(&f, &bits, sizeof(f));
    return f;
}

OA_DEVICE inline uint32_t oa_f32_bits(float f) {
    uint32_t bits;
    std::memcpy(&bits, &f, sizeof(bits));
    return bits;
}

OA_DEVICE inline float oa_f16_f32(uint16_t h) {
    const uint32_t magnitude = uint32_t(h & 0x7fff) << 13;
    // The exponent's bias is 15 there and 127 here; the product also normalises subnormals.
    const float    scaled  = oa_bits_f32(magnitude) * 0x1p112f;
    const uint32_t special = magnitude >= 0x0f800000 ? 0x7f800000u : 0u; // infinity and NaN
    return oa_bits_f32(oa_f32_bits(scaled) | special | uint32_t(h & 0x8000) << 16);
}

OA_DEVICE inline uint16_t oa_f32_f16(float f) {
    const uint32_t bits      = oa_f32_bits(f);
    const uint32_t magnitude = bits & 0x7fffffff;
    const uint32_t odd       = (magnitude >> 13) & 1;
    const uint32_t normal    = (magnitude - (112u << 23) + 0xfff + odd) >> 13;
    // Below 2^-14 the unit of f16 is 2^-24, that of an f32 near 0.5: the addition rounds.
    const uint32_t tiny    = oa_f32_bits(oa_bits_f32(magnitude) + 0.5f) - 0x3f000000;
    const uint32_t special = magnitude > 0x7f800000 ? 0x7e00u : 0x7c00u;
    const uint32_t finite  = magnitude < 0x38800000 ? tiny : normal;
    return uint16_t((magnitude >= 0x47800000 ? special : finite) | (bits >> 16 & 0x8000));
}

OA_DEVICE inline float oa_bf16_f32(uint16_t h) {
    return oa_bits_f32(uint32_t(h) << 16);
}

OA_DEVICE inline uint16_t oa_f32_bf16(float f) {
    const uint32_t bits    = oa_f32_bits(f);
    const uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    return uint16_t((bits & 0x7fffffff) > 0x7f800000 ? (bits >> 16 | 0x40) : rounded);
}
