// GCC 11.1 to 11.4, 12.1 to 12.3 and 13.1 to 13.2 take a tile configuration for 8 of its 64 bytes and drop what was stored
// in the others (GCC PR target/114098): ggml's AMX kernels then end with an illegal instruction. Included before every
// file of ggml-cpu, here and in the baseline, so both have AMX.
#pragma once

#if defined(__AMX_TILE__) && defined(__GNUC__) && !defined(__clang__)
#    include <immintrin.h>
#    undef _tile_loadconfig
#    define _tile_loadconfig(config) __asm__ volatile("ldtilecfg\t%X0" ::"m"(*(const char (*)[64])(config)))
#endif
