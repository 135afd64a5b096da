// GCC 12.2 takes a tile configuration for the first 8 of its 64 bytes and drops what was stored in the others (its
// amxtileintrin.h): ggml's AMX kernels then end with an illegal instruction. Included before every file of ggml-cpu, here
// and in the baseline, so both have AMX; where a compiler is right it changes nothing.
#pragma once

#if defined(__AMX_TILE__) && defined(__GNUC__) && !defined(__clang__)
#    include <immintrin.h>
#    undef _tile_loadconfig
#    define _tile_loadconfig(config) __asm__ volatile("ldtilecfg\t%X0" ::"m"(*(const char (*)[64])(config)))
#endif
