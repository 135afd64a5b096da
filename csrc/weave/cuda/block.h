// What the channel's kernels are written in. One text runs as CUDA kernels (cuda_block.h) and on CPU threads
// (tests/native/weave_cuda_twin.cpp); they differ in `Block`, this thread's view of the block that it belongs to:
//
//   block(), n_blocks(), thread(), n_threads()
//   sync()                     all threads of the block are here, and see what each has written
//   lanes<D>(), sum<D>(x)      how many threads share a token of D values; their sum, on each of them
//   fetch<n>(to, from)         begins to copy n = 4, 8 or 16 bytes to shared memory, for this thread alone
//   end_fetch()                of a group of such copies; await_fetched<n>(): all groups but the last n have arrived
//   has_tiles()                whether a warp of 32 threads has these, with fragments as in PTX:
//   sync_warp(), across(x, d)  as sync(); x of the lane d away
//   load_tiles(r, row)         four 8 x 8 tiles of 16-bit values, each lane has a row of one: ldmatrix
//   load_tiles_turned(r, row)  the same, each transposed
//   turn(x)                    the same tile, transposed: movmatrix
//   multiply(c, a, b0, b1)     c += a * b, 16 x 8 by 16 values in f16: mma
//   shared()                   memory of the block: `claimed`, and what the kernel needs
//   claim(word)                how many blocks were here before; in no order. Same on all threads, as the next two
//   arrive(word)               the same; who comes later sees all that this block has written
//   arrive_system(word, n)     the same, counting n, with fences for memory of other devices
//   load_acquire(), store_release(), load()   words that devices and the host share; the last in no order
//   exp(), tanh(), now(), pause()             now() in nanoseconds
#pragma once

#include "../rules.h"
#include "half.h"

#ifdef __CUDACC__
#define OA_UNROLL _Pragma("unroll")
#define OA_UNROLL_16 _Pragma("unroll 16")
#define OA_NOINLINE __noinline__
#else
#define OA_UNROLL
#define OA_UNROLL_16
#define OA_NOINLINE
#endif

namespace oa::weave::cuda {

constexpr int      max_width    = 256; // of a head
constexpr int      chunk_values = 8;   // of a head that a thread loads at once
constexpr int      max_queries  = 8;   // of an item: rows times heads
constexpr int      n_threads    = 128; // of a block on CUDA
constexpr uint32_t n_window     = 64;  // blocks of tokens whose addresses are at hand at once

// The words of a channel between two devices. Those that the sender writes are in the receiver's memory (inbox), those
// that the receiver writes in the sender's (outbox), at protocol.h's offsets: each side looks at its own memory only
// and stores to the other's. Task slots follow the inbox's pages, result slots the outbox's.
template <class Block> class Duplex {
  public:
    OA_HD Duplex(char * inbox, char * outbox) : inbox_(inbox), outbox_(outbox) {}

    template <class T> OA_DEVICE T    load_acquire(size_t word) const { return Block::load_acquire(at<T>(word)); }
    template <class T> OA_DEVICE void store_release(size_t word, T value) { Block::store_release(at<T>(word), value); }
    template <class T> OA_DEVICE T    load(size_t word) const { return Block::load(at<T>(word)); }

    OA_DEVICE char * task(uint32_t slot, uint64_t nbytes) const { return inbox_ + first_slot + slot * nbytes; }
    OA_DEVICE char * result(uint32_t slot, uint64_t nbytes) const { return outbox_ + first_slot + slot * nbytes; }

  private:
    template <class T> OA_DEVICE T * at(size_t word) const {
        return reinterpret_cast<T *>((word < receiver_page ? inbox_ : outbox_) + word);
    }

    char * inbox_;
    char * outbox_;
};

} // namespace oa::weave::cuda
