// Functions compiled twice, for any x86-64 and for AVX2, and chosen when the library is loaded.
#pragma once

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define OA_SIMD __attribute__((target_clones("default", "arch=x86-64-v3")))
#else
#define OA_SIMD
#endif
