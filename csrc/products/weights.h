// Blocks of quantised weights, unpacked into a panel: a byte per value, rows as lanes.
//
// Each type has: values and bytes of its block; values that share a scale (`part`); the offset of its bytes; whether a
// part has a minimum, which is taken from all its values; and `unpack` for as many rows as a vector has lanes.
#pragma once

#include "lanes.h"
#include "product_task.h"

namespace {

using namespace oa::products;

constexpr int panel_vectors = 2; // of rows
constexpr int panel_rows    = panel_vectors * width;
constexpr int block_groups  = int(block_values) / 4; // of four values

// Where the values of one vector of rows go. Vectors of the same values lie beside each other.
struct Unpacked {
    Bytes *  values;
    Floats * scales;
    Floats * minima;

    // Four vectors, of 16 values of each row from `first` on.
    void put(int first, Bytes a, Bytes b, Bytes c, Bytes d) const {
        Bytes * to            = values + first / 4 * panel_vectors;
        to[0]                 = a;
        to[panel_vectors]     = b;
        to[2 * panel_vectors] = c;
        to[3 * panel_vectors] = d;
    }

    void scale(int part, Floats v) const { scales[part * panel_vectors] = v; }
    void minimum(int part, Floats v) const { minima[part * panel_vectors] = v; }
};

// A number of each row.
template <class F> Ints of_rows(const char * const * rows, const F & f) {
    int32_t numbers[width];
    for (int r = 0; r < width; ++r) {
        numbers[r] = f(rows[r]);
    }
    Ints made;
    memcpy(&made, numbers, sizeof(made));
    return made;
}

inline Floats halves(const char * const * rows, size_t offset) {
    return from_halves(of_rows(rows, [&](const char * row) {
        uint16_t bits;
        memcpy(&bits, row + offset, sizeof(bits));
        return int32_t(bits);
    }));
}

// Byte i of each lane.
inline Floats byte_of(Ints v, int i) {
    return floats(v >> 8 * i & 0xff);
}

inline Floats signed_byte_of(Ints v, int i) {
    return floats(v << (24 - 8 * i) >> 24);
}

inline Bytes low(Bytes v) {
    return v & all_bytes(15);
}

inline Bytes high(Bytes v) {
    return low((Bytes) ((Ints) v >> 4));
}

struct Q4_0 {
    using Sums                   = Sum;
    static constexpr int  values = 32, bytes = 18, part = 32, offset = 8;
    static constexpr bool minimum = false;

    static void unpack(const char * const * rows, const Unpacked & to) {
        Bytes v[4];
        transposed(rows, 2, v);
        to.put(0, low(v[0]), low(v[1]), low(v[2]), low(v[3]));
        to.put(16, high(v[0]), high(v[1]), high(v[2]), high(v[3]));
        to.scale(0, halves(rows, 0));
    }
};

struct Q8_0 {
    using Sums                   = ByteSum;
    static constexpr int  values = 32, bytes = 34, part = 32, offset = byte_offset;
    static constexpr bool minimum = false;

    static void unpack(const char * const * rows, const Unpacked & to) {
        const Bytes shift = all_bytes(byte_offset);
        for (int i = 0; i < 32; i += 16) {
            Bytes v[4];
            transposed(rows, size_t(2 + i), v);
            to.put(i, v[0] ^ shift, v[1] ^ shift, v[2] ^ shift, v[3] ^ shift);
        }
        to.scale(0, halves(rows, 0));
    }
};

struct MXFP4 {
    using Sums                   = Sum;
    static constexpr int  values = 32, bytes = 17, part = 32, offset = 12;
    static constexpr bool minimum = false;

    static void unpack(const char * const * rows, const Unpacked & to) {
        // Twice the values of E2M1, plus the offset.
        static const uint8_t table[16] = { 12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0 };
        Bytes                v[4];
        transposed(rows, 1, v);
        const auto of = [&](Bytes index) { return looked_up(table, index); };
        to.put(0, of(low(v[0])), of(low(v[1])), of(low(v[2])), of(low(v[3])));
        to.put(16, of(high(v[0])), of(high(v[1])), of(high(v[2])), of(high(v[3])));
        // Half of 2^(e - 127).
        const Ints e     = of_rows(rows, [](const char * row) { return int32_t(uint8_t(*row)); });
        const Ints least = e < 2; // a denormal
        to.scale(0, (Floats) ((least & (all(0x00200000) << (e & 1))) | (~least & ((e - 1) << 23))));
    }
};

struct Q4_K {
    using Sums                   = Sum;
    static constexpr int  values = 256, bytes = 144, part = 32, offset = 0;
    static constexpr bool minimum = true;

    static void unpack(const char * const * rows, const Unpacked & to) {
        for (int i = 0; i < 8; ++i) {
            Bytes v[4];
            transposed(rows, size_t(16 + 16 * i), v);
            const int first = i / 2 * 64 + i % 2 * 16;
            to.put(first, low(v[0]), low(v[1]), low(v[2]), low(v[3]));
            to.put(first + 32, high(v[0]), high(v[1]), high(v[2]), high(v[3]));
        }
        // Both scales of the block, then 12 bytes with those of the parts, of 6 bits.
        Bytes head[4];
        transposed(rows, 0, head);
        const Ints   a = (Ints) head[1], b = (Ints) head[2], c = (Ints) head[3];
        const Ints   scales[2] = { a & 0x3f3f3f3f, (c & 0x0f0f0f0f) | (a >> 2 & 0x30303030) };
        const Ints   minima[2] = { b & 0x3f3f3f3f, (c >> 4 & 0x0f0f0f0f) | (b >> 2 & 0x30303030) };
        const Floats d = from_halves((Ints) head[0]), d_minimum = -from_halves((Ints) head[0] >> 16);
        for (int part = 0; part < 8; ++part) {
            to.scale(part, d * byte_of(scales[part / 4], part % 4));
            to.minimum(part, d_minimum * byte_of(minima[part / 4], part % 4));
        }
    }
};

struct Q6_K {
    using Sums                   = Sum;
    static constexpr int  values = 256, bytes = 210, part = 16, offset = 32;
    static constexpr bool minimum = false;

    static void unpack(const char * const * rows, const Unpacked & to) {
        for (int i = 0; i < 8; ++i) {
            const int half = i / 4, j = i % 4, shift = j / 2 * 2, first = half * 128 + j * 16;
            Bytes     v[4], more[4];
            transposed(rows, size_t(16 * i), v);
            transposed(rows, size_t(128 + half * 32 + j % 2 * 16), more);
            const auto of_low  = [&](int k) { return low(v[k]) | upper(more[k], shift); };
            const auto of_high = [&](int k) { return high(v[k]) | upper(more[k], shift + 4); };
            to.put(first, of_low(0), of_low(1), of_low(2), of_low(3));
            to.put(first + 64, of_high(0), of_high(1), of_high(2), of_high(3));
        }
        Bytes scales[4];
        transposed(rows, 192, scales);
        const Floats d = halves(rows, 208);
        for (int part = 0; part < 16; ++part) {
            to.scale(part, d * signed_byte_of((Ints) scales[part / 4], part % 4));
        }
    }

    // Two bits of each byte, at the place of bits 4 and 5.
    static Bytes upper(Bytes v, int shift) { return (Bytes) ((Ints) v >> shift << 4) & all_bytes(0x30); }
};

} // namespace
