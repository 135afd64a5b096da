// Many query rows on CPUs with AMX: products of tiles of bf16. Every value is the sum of two bf16 numbers, its upper
// and its lower part. Three of the four products of parts are added, in f32; the fourth is below the rounding of f32.
#pragma once

#include "cache_rows.h"
#include "task.h"
#include "vectors.h"

#if defined(__AMX_BF16__)

namespace {

using namespace oa::attend;

constexpr int64_t side = 16; // rows of a tile; a row has 16 words of two bf16 numbers

typedef uint32_t Words __attribute__((vector_size(64)));
typedef Words    WordsAnywhere __attribute__((aligned(4), may_alias));

// The parts of a block lie one after the other: all upper ones, then all lower ones.
struct Parts {
    uint32_t * upper;
    uint32_t * lower;
};

inline Parts parts_in(float * memory, int64_t n_words) {
    uint32_t * words = reinterpret_cast<uint32_t *>(memory);
    return { words, words + n_words };
}

inline void store(uint32_t * to, Words words) {
    *reinterpret_cast<WordsAnywhere *>(to) = words;
}

struct Pairs {
    Words upper, lower;
};

// Word i is of a[i] in its low half and of b[i] in its high half.
inline Pairs pairs(Floats a, Floats b) {
    const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                                           21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    const auto    join  = [&](Floats x, Floats y) {
        return (Words) _mm512_permutexvar_epi16(order, (__m512i) _mm512_cvtne2ps_pbh((__m512) y, (__m512) x));
    };
    const Words upper = join(a, b);
    return { upper, join(a - (Floats) (upper << 16), b - (Floats) (upper & 0xffff0000u)) };
}

// 32 values of a row, two in a word.
inline Pairs neighbours(Floats first, Floats second) {
    const auto    join  = [](Floats x, Floats y) { return (__m512i) _mm512_cvtne2ps_pbh((__m512) y, (__m512) x); };
    const __m512i upper = join(first, second);
    const auto    wide  = [](__m256i half) { return (Floats) _mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16); };
    return { (Words) upper, (Words) join(first - wide(_mm512_castsi512_si256(upper)),
                                         second - wide(_mm512_extracti64x4_epi64(upper, 1))) };
}

inline void transpose(Words * rows) {
    __m512i * r = reinterpret_cast<__m512i *>(rows);
    __m512i   t[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; i += 2) {
        t[i]     = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
#pragma GCC unroll 16
    for (int i = 0; i < 16; i += 4) {
        r[i]     = _mm512_unpacklo_epi64(t[i], t[i + 2]);
        r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
        r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
#pragma GCC unroll 16
    for (int i = 0; i < 4; ++i) {
        t[i]      = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
        t[i + 4]  = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
        t[i + 8]  = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
        t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
    }
#pragma GCC unroll 16
    for (int i = 0; i < 4; ++i) {
        r[i]      = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
        r[i + 4]  = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
        r[i + 8]  = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
        r[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd);
    }
}

// A factor of a product: where its tiles begin, and the words to the next row, to the next tile and to the next tile of
// the same sum. `lower` is null where the upper parts are all there is.
struct Factor {
    const uint32_t *upper, *lower;
    int64_t         to_row, to_tile, to_summand;

    Factor from(int64_t tile) const {
        return { upper + tile * to_tile, lower ? lower + tile * to_tile : nullptr, to_row, to_tile, to_summand };
    }
};

// Up to 2 x 2 tiles of c (+)= left x right, sums of n products of tiles.
template <int n_left, int n_right>
inline void tile_products(const Factor & left, const Factor & right, int64_t n, float * c, int64_t c_stride, bool add) {
    const auto    at    = [&](int i, int j) { return c + i * side * c_stride + j * side; };
    const int64_t bytes = c_stride * int64_t(sizeof(float));
    if (add) {
        _tile_loadd(0, at(0, 0), bytes);
        if (n_right > 1)
            _tile_loadd(1, at(0, 1), bytes);
        if (n_left > 1)
            _tile_loadd(2, at(1, 0), bytes);
        if (n_left > 1 && n_right > 1)
            _tile_loadd(3, at(1, 1), bytes);
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    const auto multiply = [] {
        _tile_dpbf16ps(0, 4, 6);
        if (n_right > 1)
            _tile_dpbf16ps(1, 4, 7);
        if (n_left > 1)
            _tile_dpbf16ps(2, 5, 6);
        if (n_left > 1 && n_right > 1)
            _tile_dpbf16ps(3, 5, 7);
    };
    const auto load_left = [&](const uint32_t * from) {
        _tile_loadd(4, from, 4 * left.to_row);
        if (n_left > 1)
            _tile_loadd(5, from + left.to_tile, 4 * left.to_row);
    };
    const auto load_right = [&](const uint32_t * from) {
        _tile_loadd(6, from, 4 * right.to_row);
        if (n_right > 1)
            _tile_loadd(7, from + right.to_tile, 4 * right.to_row);
    };
    for (int64_t i = 0; i < n; ++i) {
        load_left(left.upper + i * left.to_summand);
        if (right.lower) {
            load_right(right.lower + i * right.to_summand);
            multiply();
        }
        load_right(right.upper + i * right.to_summand);
        multiply();
        if (left.lower) {
            load_left(left.lower + i * left.to_summand);
            multiply();
        }
    }
    _tile_stored(0, at(0, 0), bytes);
    if (n_right > 1)
        _tile_stored(1, at(0, 1), bytes);
    if (n_left > 1)
        _tile_stored(2, at(1, 0), bytes);
    if (n_left > 1 && n_right > 1)
        _tile_stored(3, at(1, 1), bytes);
}

// c[i][j] (+)= left[i] x right[j] for all tiles of both.
inline void all_tiles(const Factor & left, int64_t n_left, const Factor & right, int64_t n_right, int64_t n, float * c,
                      int64_t c_stride, bool add) {
    for (int64_t i = 0; i < n_left; i += 2) {
        for (int64_t j = 0; j < n_right; j += 2) {
            float *      to = c + i * side * c_stride + j * side;
            const Factor l = left.from(i), r = right.from(j);
            const bool   two_left = i + 1 < n_left, two_right = j + 1 < n_right;
            if (two_left && two_right) {
                tile_products<2, 2>(l, r, n, to, c_stride, add);
            } else if (two_left) {
                tile_products<2, 1>(l, r, n, to, c_stride, add);
            } else if (two_right) {
                tile_products<1, 2>(l, r, n, to, c_stride, add);
            } else {
                tile_products<1, 1>(l, r, n, to, c_stride, add);
            }
        }
    }
}

// The tiles' shapes while it lives. ggml's AMX kernels set theirs once per thread and expect them to stay.
class TileShapes {
  public:
    TileShapes() {
        __asm__ volatile("sttilecfg\t%X0" : "=m"(before_));
        Config mine{ 1, 0, {}, {}, {} };
        for (int i = 0; i < 8; ++i) {
            mine.row_bytes[i] = 64;
            mine.rows[i]      = side;
        }
        load(mine);
    }

    ~TileShapes() {
        if (before_.palette) {
            load(before_);
        } else {
            _tile_release();
        }
    }

    TileShapes(const TileShapes &)             = delete;
    TileShapes & operator=(const TileShapes &) = delete;

  private:
    struct alignas(64) Config {
        uint8_t  palette, start_row, reserved[14];
        uint16_t row_bytes[16];
        uint8_t  rows[16];
    };

    // The intrinsic of some compilers reads 8 of the 64 bytes (cmake/amx_tile_config.h).
    static void load(const Config & config) { __asm__ volatile("ldtilecfg\t%X0" ::"m"(config)); }

    Config before_;
};

// Rows of K as they lie, two values in a word: left factor of the scores. Tokens beyond n are 0.
template <class K> void pack_rows(const char * rows, size_t stride, int64_t n, int64_t n_padded, int64_t d, Parts to) {
    const int64_t words = padded(d, 2 * side) / 2;
    for (int64_t t = 0; t < n_padded; ++t) {
        const char * row = rows + size_t(t) * stride;
        if (t < n) {
            prefetch(row + ahead * stride, bytes_of<K>(d));
        }
        for (int64_t i = 0; i < d; i += 2 * side) {
            const Floats first  = t < n ? load_alone<K>(row, i) : Floats{};
            const Floats second = t < n && i + side < d ? load_alone<K>(row, i + side) : Floats{};
            const Pairs  both   = neighbours(first, second);
            store(to.upper + t * words + i / 2, both.upper);
            store(to.lower + t * words + i / 2, both.lower);
        }
    }
}

// Rows of V, two tokens in a word: right factor of the values. Tokens beyond n are 0.
template <class V> void pack_pairs(const char * rows, size_t stride, int64_t n, int64_t n_padded, int64_t d, Parts to) {
    for (int64_t t = 0; t < n_padded; t += 2) {
        const char * row = rows + size_t(t) * stride;
        if (t < n) {
            prefetch(row + ahead * stride, bytes_of<V>(d));
            prefetch(row + (ahead + 1) * stride, bytes_of<V>(d));
        }
        for (int64_t i = 0; i < d; i += side) {
            const Pairs both =
                pairs(t < n ? load_alone<V>(row, i) : Floats{}, t + 1 < n ? load_alone<V>(row + stride, i) : Floats{});
            store(to.upper + t / 2 * d + i, both.upper);
            store(to.lower + t / 2 * d + i, both.lower);
        }
    }
}

// Up to 16 rows of queries: a right factor of the scores. `row(r)` is null beyond the last.
template <class Row> void pack_queries(const Row & row, float scale, int64_t d, Parts to) {
    for (int64_t i = 0; i < d; i += 2 * side) {
        Words upper[side], lower[side];
        for (int64_t r = 0; r < side; ++r) {
            const float * values = row(r);
            const Floats  first  = values ? load(values + i) * scale : Floats{};
            const Floats  second = values && i + side < d ? load(values + i + side) * scale : Floats{};
            const Pairs   both   = neighbours(first, second);
            upper[r]             = both.upper;
            lower[r]             = both.lower;
        }
        transpose(upper);
        transpose(lower);
        for (int64_t r = 0; r < side; ++r) {
            store(to.upper + (i / 2 + r) * side, upper[r]);
            store(to.lower + (i / 2 + r) * side, lower[r]);
        }
    }
}

// Weights of 16 rows, scores[token][row]: left factor of the values. `to` is of the first row.
inline void pack_weights(const float * scores, int64_t stride, int64_t n_tokens, Parts to) {
    for (int64_t t = 0; t < n_tokens; t += 2 * side) {
        Words upper[side], lower[side];
        for (int64_t i = 0; i < side; ++i) {
            const float * at   = scores + (t + 2 * i) * stride;
            const Pairs   both = pairs(load(at), load(at + stride));
            upper[i]           = both.upper;
            lower[i]           = both.lower;
        }
        transpose(upper);
        transpose(lower);
        for (int64_t r = 0; r < side; ++r) {
            store(to.upper + r * block_tokens / 2 + t / 2, upper[r]);
            store(to.lower + r * block_tokens / 2 + t / 2, lower[r]);
        }
    }
}

} // namespace

#endif
