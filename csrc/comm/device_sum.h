// The phase inside a host for values in device memory: what the ranks' devices do. One text for CUDA kernels
// (device_sum_cuda.cu) and for CPU threads (device_cpu.cpp), which differ in a policy of a dozen primitives.
//
// Every rank has an area that the devices of all ranks of its host can read and write: flags, two input buffers (of
// even and odd epochs), a result buffer. An epoch is one piece of a message, at most a buffer long. Its steps, each a
// kernel of its own:
//
//   one-shot:  PUT  ADD              every rank adds up all inputs: least latency
//   two-shot:  PUT  REDUCE  GATHER   every rank adds up one slice, then fetches the others': least traffic
//   hosts:     PUT  REDUCE; the LM: GATHER to host memory, (MPI), GIVE; all: TAKE the LM's result
//
// PUT, REDUCE and GIVE raise a flag at every rank when their data is written; ADD, REDUCE, GATHER and TAKE first wait
// for the flags of those whose data they read. Values are added in f32 in the order of the ranks and rounded once: the
// bits of oa_sum() (sum.h), the same on all ranks.
//
// Blocks. All ranks use equally many blocks, and block b reads only what blocks b of other ranks have written, so flags
// are per block and no block waits for another of its own grid. No kernel that others wait for waits itself, REDUCE
// aside, whose flags are raised block by block: nothing depends on which kernels run at the same time, and ranks may
// share one GPU in turns.
//
// Reuse. A flag holds the epoch, which only grows, and the operation's tag, so ranks at different operations find out
// before a wrong sum is made. A rank writes an input buffer again two epochs later, when its ADD or REDUCE of the epoch
// between has seen all ranks' next inputs, each put after its rank was done with this epoch. A result buffer is written
// after all inputs of the next epoch are there, thus after all have fetched the last result.
//
// Waits are bounded: by `patience`, and by an abort word in host memory. A block that gives up says why in the report
// and returns; the host looks what is wrong and launches the step again (intra_host_device.cpp). ADD, GATHER and TAKE
// can run any number of times; REDUCE remembers which blocks are done.
#pragma once

#include "comm_types.h"
#include "half.h"

#include <cstddef>
#include <cstdint>

constexpr int OA_DEVICE_RANKS   = 16;
constexpr int OA_DEVICE_BLOCKS  = 64;  // enough to fill NVLink (vLLM takes 36 on H100); not measured here
constexpr int OA_DEVICE_THREADS = 512; // of a block on CUDA

enum oa_device_step { OA_PUT, OA_ADD, OA_REDUCE, OA_GATHER, OA_GIVE, OA_TAKE };

struct oa_device_flag {
    uint64_t epoch;
    uint64_t tag; // written before the epoch
};

enum { OA_INPUT_FLAG, OA_SUM_FLAG, OA_RESULT_FLAG, OA_N_FLAGS };

// At the start of an area, all zero before the first epoch, 1 or more. Flags of odd and even epochs, of the rank and
// block that raised them.
struct oa_device_header {
    oa_device_flag flags[OA_N_FLAGS][2][OA_DEVICE_RANKS][OA_DEVICE_BLOCKS];
    uint64_t       reduced[OA_DEVICE_BLOCKS]; // the epoch that this rank's block last did REDUCE for
};

// In host memory that the device can address.
struct oa_device_report {
    uint32_t abort;                   // set by the host: waits end
    uint32_t late, aborted, mismatch; // set by the device: a flag has not come; was another operation's
};

struct oa_device_call {
    oa_device_step     step;
    oa_dtype           dtype;
    int                rank, n_ranks; // of the host
    int                lm;
    int                n_slices; // 1, or n_ranks when every rank adds up one
    uint64_t           epoch, tag;
    uint64_t           patience; // nanoseconds
    uint64_t           n;        // elements
    size_t             buffer;   // bytes of a buffer, a multiple of 256
    const void *       from;     // of PUT, GIVE
    void *             to;       // of ADD, GATHER, TAKE
    oa_device_report * report;
    char *             areas[OA_DEVICE_RANKS];
};

constexpr size_t OA_DEVICE_HEADER = (sizeof(oa_device_header) + 255) / 256 * 256;

constexpr size_t oa_device_area(size_t buffer) {
    return OA_DEVICE_HEADER + 3 * buffer;
}

// How many slices a message on one host is added up in. Two steps instead of one pay when every rank would read much
// more than its share: vLLM's thresholds for A100 and H100 over NVLink, not measured here.
inline int oa_device_slices(size_t n_bytes, int n_ranks) {
    const size_t most = n_ranks <= 4 ? 512 << 10 : 256 << 10;
    return n_ranks <= 2 || n_bytes <= most ? 1 : n_ranks;
}

// Values are moved 16 bytes at a time.
template <typename T> struct alignas(16) oa_pack {
    static constexpr uint64_t size = 16 / sizeof(T);

    T values[size];
};

// Element types: how they are kept and what is added up.
struct oa_f32_values {
    using type = float;
    static OA_DEVICE float widen(float x) { return x; }
    static OA_DEVICE float narrow(float x) { return x; }
};

struct oa_f16_values {
    using type = uint16_t;
    static OA_DEVICE float    widen(uint16_t x) { return oa_f16_f32(x); }
    static OA_DEVICE uint16_t narrow(float x) { return oa_f32_f16(x); }
};

struct oa_bf16_values {
    using type = uint16_t;
    static OA_DEVICE float    widen(uint16_t x) { return oa_bf16_f32(x); }
    static OA_DEVICE uint16_t narrow(float x) { return oa_f32_bf16(x); }
};

// `all`: the pack is whole and both sides lie on 16 bytes.
template <typename T> OA_DEVICE inline oa_pack<T> oa_load(const T * from, uint64_t n, bool all) {
    if (all) {
        return *reinterpret_cast<const oa_pack<T> *>(from);
    }
    oa_pack<T> pack = {};
    for (uint64_t i = 0; i < oa_pack<T>::size && i < n; ++i) {
        pack.values[i] = from[i];
    }
    return pack;
}

template <typename T> OA_DEVICE inline void oa_store(T * to, const oa_pack<T> & pack, uint64_t n, bool all) {
    if (all) {
        *reinterpret_cast<oa_pack<T> *>(to) = pack;
        return;
    }
    for (uint64_t i = 0; i < oa_pack<T>::size && i < n; ++i) {
        to[i] = pack.values[i];
    }
}

// One block's part of a step. `Block` is this thread's view of the block it belongs to:
//   block(), n_blocks(), thread(), n_threads()
//   sync()                       all threads of the block are here, and see what each has written
//   all(bool)                    the same; true when it is for all threads
//   load_acquire(), store_release()   64-bit words that ranks share, ordered over all devices and the host
//   load_host(), store_host()         32-bit words in host memory, in no order
//   now(), pause()               nanoseconds; between two looks at a flag
template <typename Values, typename Block> class oa_device_block {
    using T    = typename Values::type;
    using pack = oa_pack<T>;

  public:
    OA_DEVICE oa_device_block(Block & block, const oa_device_call & call) : b_(block), c_(call) {}

    OA_DEVICE void run() {
        switch (c_.step) {
            case OA_PUT: put(input(c_.rank), OA_INPUT_FLAG, c_.n_slices); return;
            case OA_GIVE: put(result(c_.rank), OA_RESULT_FLAG, 1); return;
            case OA_ADD: add(0, static_cast<T *>(c_.to)); return;
            case OA_REDUCE: reduce(); return;
            case OA_GATHER: gather(); return;
            case OA_TAKE: take(); return;
        }
    }

  private:
    struct range {
        uint64_t begin, end;
    };

    OA_DEVICE oa_device_header & header(int rank) const {
        return *reinterpret_cast<oa_device_header *>(c_.areas[rank]);
    }
    OA_DEVICE T * input(int rank) const {
        return reinterpret_cast<T *>(c_.areas[rank] + OA_DEVICE_HEADER + (c_.epoch & 1) * c_.buffer);
    }
    OA_DEVICE T * result(int rank) const {
        return reinterpret_cast<T *>(c_.areas[rank] + OA_DEVICE_HEADER + 2 * c_.buffer);
    }
    // The flag at rank `at` that this block of rank `of` raises.
    OA_DEVICE oa_device_flag & flag(int kind, int at, int of) const {
        return header(at).flags[kind][c_.epoch & 1][of][b_.block()];
    }

    // Whole cache lines.
    OA_DEVICE range slice(int index, int n_slices) const {
        const uint64_t unit = uint64_t(n_slices) * 64;
        const uint64_t part = (c_.n + unit - 1) / unit * 64;
        const uint64_t from = uint64_t(index) * part, to = from + part;
        return { from < c_.n ? from : c_.n, to < c_.n ? to : c_.n };
    }

    static OA_DEVICE bool on_16(const void * at) { return reinterpret_cast<uintptr_t>(at) % 16 == 0; }

    // action(at, n, whole) for this thread's packs of n elements. Which block has which depends on the range alone.
    template <typename F> OA_DEVICE void each_pack(range r, F && action) {
        const uint64_t threads = uint64_t(b_.n_threads());
        const uint64_t first   = uint64_t(b_.block()) * threads + uint64_t(b_.thread());
        for (uint64_t at = r.begin + first * pack::size; at < r.end;
             at += uint64_t(b_.n_blocks()) * threads * pack::size) {
            action(at, r.end - at, r.end - at >= pack::size);
        }
    }

    OA_DEVICE void copy(T * to, const T * from, range r) {
        const bool even = on_16(to) && on_16(from);
        each_pack(r, [&](uint64_t at, uint64_t n, bool whole) {
            oa_store(to + at, oa_load(from + at, n, even && whole), n, even && whole);
        });
    }

    OA_DEVICE void put(T * to, int kind, int n_slices) {
        for (int s = 0; s < n_slices; ++s) { // as the slices' readers divide them among their blocks
            copy(to, static_cast<const T *>(c_.from), slice(s, n_slices));
        }
        raise(kind);
    }

    OA_DEVICE bool add(int index, T * to) {
        if (!await(OA_INPUT_FLAG, 0, c_.n_ranks)) {
            return false;
        }
        const bool even = on_16(to);
        each_pack(slice(index, c_.n_slices), [&](uint64_t at, uint64_t n, bool whole) {
            float sums[pack::size] = {};
            for (int rank = 0; rank < c_.n_ranks; ++rank) {
                const pack values = oa_load(input(rank) + at, n, whole);
                for (uint64_t i = 0; i < pack::size; ++i) {
                    const float value = Values::widen(values.values[i]);
                    sums[i]           = rank == 0 ? value : sums[i] + value; // -0 stays -0
                }
            }
            pack total;
            for (uint64_t i = 0; i < pack::size; ++i) {
                total.values[i] = Values::narrow(sums[i]);
            }
            oa_store(to + at, total, n, even && whole);
        });
        return true;
    }

    OA_DEVICE void reduce() {
        uint64_t & done = header(c_.rank).reduced[b_.block()];
        if (done == c_.epoch || !add(c_.rank, result(c_.rank))) {
            return;
        }
        raise(OA_SUM_FLAG);
        if (b_.thread() == 0) {
            done = c_.epoch; // read by all threads before add(), which has waited for them
        }
    }

    OA_DEVICE void gather() {
        if (await(OA_SUM_FLAG, 0, c_.n_ranks)) {
            for (int rank = 0; rank < c_.n_ranks; ++rank) {
                copy(static_cast<T *>(c_.to), result(rank), slice(rank, c_.n_slices));
            }
        }
    }

    OA_DEVICE void take() {
        if (await(OA_RESULT_FLAG, c_.lm, 1)) {
            copy(static_cast<T *>(c_.to), result(c_.lm), slice(0, 1));
        }
    }

    // At every rank: what this block has written is there.
    OA_DEVICE void raise(int kind) {
        b_.sync();
        for (int rank = b_.thread(); rank < c_.n_ranks; rank += b_.n_threads()) {
            oa_device_flag & f = flag(kind, rank, c_.rank);
            f.tag              = c_.tag;
            b_.store_release(&f.epoch, c_.epoch);
        }
    }

    // Until `n` ranks from `first` have raised their flags. False on all threads when one has not.
    OA_DEVICE bool await(int kind, int first, int n) {
        bool came = true;
        for (int i = b_.thread(); i < n; i += b_.n_threads()) {
            came = await(flag(kind, c_.rank, first + i)) && came;
        }
        return b_.all(came);
    }

    OA_DEVICE bool await(const oa_device_flag & f) {
        const uint64_t since = b_.now();
        while (true) {
            const uint64_t epoch = b_.load_acquire(&f.epoch);
            if (epoch >= c_.epoch) {
                return (epoch == c_.epoch && f.tag == c_.tag) || give_up(&c_.report->mismatch);
            }
            if (b_.load_host(&c_.report->abort)) {
                return give_up(&c_.report->aborted);
            }
            if (b_.now() - since >= c_.patience) {
                return give_up(&c_.report->late);
            }
            b_.pause();
        }
    }

    OA_DEVICE bool give_up(uint32_t * why) {
        b_.store_host(why, 1);
        return false;
    }

    Block &                b_;
    const oa_device_call & c_;
};

// Blocks of a step's grid, the same on all ranks: every thread of the largest slice has a pack, if there are enough.
inline int oa_device_blocks(const oa_device_call & call) {
    const uint64_t packs  = call.n / uint64_t(call.n_slices) / (call.dtype == OA_F32 ? 4 : 8);
    const uint64_t blocks = packs / OA_DEVICE_THREADS + 1;
    return blocks < OA_DEVICE_BLOCKS ? int(blocks) : OA_DEVICE_BLOCKS;
}
