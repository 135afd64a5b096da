// The memory that a sender (hot model) and a receiver (cold model) share: one header for g++ and nvcc.
//
//   header        what the region is                                 written by the receiver, once
//   sender page   epoch, base, tail, doorbell, sleeping              written by the sender
//   receiver page accepted epoch, done, state, heartbeat, room, ..   written by the receiver
//   task slots    n_slots: a header and a payload                    written by the sender
//   result slots  n_slots: a header and a payload                    written by the receiver
//
// Every word has one writer. Words that the other side reads while they change stand alone on their line of 128 bytes
// and are stored with release, loaded with acquire, in system scope (ring.h). Positions are offsets from the region's
// begin, never pointers. Task t (a number that wraps around at 2^32) is in slot t modulo n_slots. Nobody waits here:
// who waits does so elsewhere, with a bound.
#pragma once

#include <stddef.h>
#include <stdint.h>

// Before functions that CUDA kernels share with code of the CPU.
#ifdef __CUDACC__
#define OA_HD __host__ __device__
#else
#define OA_HD
#endif

namespace oa::weave {

constexpr uint32_t magic         = 0x5645574f; // "OWEV"
constexpr uint32_t version       = 6;
constexpr size_t   line          = 128;
constexpr uint32_t max_sequences = 256; // of one task

enum class State : uint32_t { none, ready, draining, ended };

enum class Kind : uint32_t {
    ping,    // the payload comes back inverted: both directions work
    open,    // a sequence: OpenTask -> Handle
    reserve, // room for its tokens: ReserveTask
    trim,    // to a number of tokens; of zero it is forgotten: ReserveTask
    attend,  // append K and V, compute the attention: AttendTask -> rows of float
    append,  // K and V alone: AttendTask of no heads -> nothing
};

enum class Status : uint32_t { ok, malformed, unknown_sequence, no_room };

struct Header {
    uint32_t magic;
    uint32_t version;
    uint64_t boot; // random: another receiver, another number
    uint64_t region_nbytes;
    uint64_t tasks, results; // offsets of the first slots
    uint64_t task_nbytes, result_nbytes;
    uint32_t n_slots; // a power of two
    uint32_t pid;     // of the receiver
};

struct alignas(line) Word32 {
    uint32_t value;
};

struct alignas(line) Word64 {
    uint64_t value;
};

struct SenderPage {
    Word64 epoch;    // of this sender; what carries another one is refused
    Word32 base;     // number of the task before the first of this epoch
    Word32 tail;     // of the last task that is complete
    Word32 doorbell; // counts tasks; the receiver sleeps on it
    Word32 sleeping; // the sender sleeps on `done`
};

struct ReceiverPage {
    Word64 accepted; // epoch of the sender that is served
    Word32 done;     // number of the last task whose result is complete
    Word32 state;
    Word32 heartbeat; // counts while the receiver's process runs
    Word32 sleeping;  // the receiver sleeps on `doorbell`
    Word64 free_nbytes;
};

constexpr size_t sender_page   = 4096;
constexpr size_t receiver_page = 2 * 4096;
constexpr size_t first_slot    = 3 * 4096;

namespace word {
constexpr size_t epoch       = sender_page + offsetof(SenderPage, epoch);
constexpr size_t base        = sender_page + offsetof(SenderPage, base);
constexpr size_t tail        = sender_page + offsetof(SenderPage, tail);
constexpr size_t doorbell    = sender_page + offsetof(SenderPage, doorbell);
constexpr size_t tx_sleeping = sender_page + offsetof(SenderPage, sleeping);
constexpr size_t accepted    = receiver_page + offsetof(ReceiverPage, accepted);
constexpr size_t done        = receiver_page + offsetof(ReceiverPage, done);
constexpr size_t state       = receiver_page + offsetof(ReceiverPage, state);
constexpr size_t heartbeat   = receiver_page + offsetof(ReceiverPage, heartbeat);
constexpr size_t rx_sleeping = receiver_page + offsetof(ReceiverPage, sleeping);
constexpr size_t free_nbytes = receiver_page + offsetof(ReceiverPage, free_nbytes);
} // namespace word

struct TaskHeader {
    uint64_t epoch;
    uint64_t checksum; // of the rest of the header, and of the payload
    uint32_t number;
    Kind     kind;
    uint32_t nbytes; // of the payload
    uint32_t unused;
};

struct ResultHeader {
    uint64_t epoch;
    uint64_t checksum;
    uint32_t number;
    Status   status;
    uint32_t nbytes;
    uint32_t unused;
};

static_assert(sizeof(TaskHeader) <= line && sizeof(ResultHeader) <= line, "payloads begin after a line");

// A sequence in the receiver's memory. The generation is another one whenever the place is given to another sequence.
struct Handle {
    uint32_t place;
    uint32_t generation;
};

struct OpenTask {
    uint32_t n_layers;
    uint32_t max_tokens;
    uint32_t k_type, v_type; // ggml_type of what is kept
    uint32_t k_width;        // values of a token's K in the largest layer
    uint32_t v_width;
};

struct ReserveTask {
    Handle   handle;
    uint32_t n_tokens;
};

// Rows of one layer. After it: n_sequences SequenceRows, sinks (n_head floats, if any), then Q, K and V of n_rows each,
// as float, each part on a multiple of 64 bytes. The result is n_rows times n_head x d_v floats. Of an append task
// n_head is 0: it has no Q, and its result is empty.
struct AttendTask {
    uint32_t layer;
    uint32_t n_rows, n_sequences;
    uint32_t n_head, n_head_kv, d_k, d_v;
    float    scale, max_bias, softcap;
    uint32_t has_sinks;
    uint32_t tiled;    // as ggml-cpu does with batches of many rows
    uint32_t n_chunks; // above 1: a single row's tokens, cut as ggml-cpu cuts them for as many threads,
    uint32_t n_padded; // of so many tokens
    uint32_t own;      // by our kernel of this number (own_attention.h), each row alone; 0: by ggml-cpu's
};

// Consecutive rows that belong to one sequence: its tokens position, position + 1, ..
struct SequenceRows {
    Handle   handle;
    uint32_t position;
    uint32_t n_rows;
};

// Offsets of the parts of an attend task's payload, and its size.
struct AttendLayout {
    OA_HD explicit AttendLayout(const AttendTask & task) {
        const size_t n = task.n_rows;
        rows           = aligned(sizeof(AttendTask));
        sinks          = aligned(rows + task.n_sequences * sizeof(SequenceRows));
        q              = aligned(sinks + (task.has_sinks ? task.n_head * sizeof(float) : 0));
        k              = aligned(q + n * task.n_head * task.d_k * sizeof(float));
        v              = aligned(k + n * task.n_head_kv * task.d_k * sizeof(float));
        nbytes         = v + n * task.n_head_kv * task.d_v * sizeof(float);
    }

    size_t rows, sinks, q, k, v, nbytes;

  private:
    static OA_HD size_t aligned(size_t at) { return (at + 63) / 64 * 64; }
};

// Whether a comes after b, or is b, among numbers that wrap around.
OA_HD constexpr bool reached(uint32_t a, uint32_t b) {
    return int32_t(a - b) >= 0;
}
static_assert(reached(2, 0xfffffffeu) && !reached(0xfffffffeu, 2) && reached(7, 7), "numbers wrap around");

// Whether tasks wait after `done`, up to `tail`: there are no more than slots, or the numbers are damaged.
OA_HD constexpr bool waits(uint32_t tail, uint32_t done, uint32_t n_slots) {
    return tail - done - 1 < n_slots;
}
static_assert(waits(2, 0xfffffffeu, 4) && !waits(7, 7, 4) && !waits(6, 7, 4) && !waits(12, 7, 4), "a window");

} // namespace oa::weave
