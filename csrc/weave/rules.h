// What the two sides of a channel (protocol.h) hold each other to, on CPUs and GPUs alike: which tasks and answers are
// sound, how many rows a task takes, and the checksums of what lies in slots. One header for g++ and nvcc.
//
// Checks are of private copies: the other side may change its memory at any time.
#pragma once

#include "protocol.h"

#include <cstring>

namespace oa::weave {

constexpr uint32_t max_rows  = 1u << 20; // of a task
constexpr uint32_t max_heads = 1024;

// Bytes of an attend task's result.
OA_HD constexpr size_t answer_nbytes(const AttendTask & task) {
    return size_t(task.n_rows) * task.n_head * task.d_v * sizeof(float);
}

// Whether the sizes of K and V can be, with heads of at most max_width values, in multiples of `unit`.
OA_HD constexpr bool has_sound_rows(const AttendTask & task, uint32_t max_width, uint32_t unit) {
    return task.n_rows > 0 && task.n_rows <= max_rows && task.n_sequences > 0 && task.n_sequences <= max_sequences &&
           task.n_head_kv > 0 && task.n_head_kv <= max_heads && task.d_k > 0 && task.d_k <= max_width &&
           task.d_k % unit == 0 && task.d_v > 0 && task.d_v <= max_width && task.d_v % unit == 0;
}

// Whether all sizes of an attend task can be.
OA_HD constexpr bool is_sound(const AttendTask & task, uint32_t max_width, uint32_t unit) {
    return has_sound_rows(task, max_width, unit) && task.n_head > 0 && task.n_head <= max_heads &&
           task.n_head % task.n_head_kv == 0;
}

// The same of an append task.
OA_HD constexpr bool is_sound_append(const AttendTask & task, uint32_t max_width, uint32_t unit) {
    return has_sound_rows(task, max_width, unit) && task.n_head == 0 && !task.has_sinks && !task.tiled && !task.own;
}

// Whether a sound task's payload has as many bytes as it should, and its answer no more than there is room for.
OA_HD inline bool fits_slots(const AttendTask & task, size_t nbytes, size_t room) {
    return AttendLayout(task).nbytes == nbytes && answer_nbytes(task) <= room;
}

// Whether sequences of this shape have what a sound task says of its layer.
OA_HD constexpr bool fits_shape(const AttendTask & task, const OpenTask & shape) {
    return task.layer < shape.n_layers && task.n_head_kv * task.d_k <= shape.k_width &&
           task.n_head_kv * task.d_v <= shape.v_width;
}

// Whether sequence i of a task is there before: what computes one of them is not to write what others read.
OA_HD inline bool is_again(const SequenceRows * all, uint32_t i) {
    bool again = false;
    for (uint32_t earlier = 0; earlier < i; ++earlier) {
        again = again || all[earlier].handle.place == all[i].handle.place;
    }
    return again;
}

// Rows of a sequence that has room for n_tokens, where the task has so many rows left.
OA_HD constexpr Status check_rows(const SequenceRows & given, uint32_t n_left, uint64_t n_tokens) {
    return given.n_rows == 0 || given.n_rows > n_left         ? Status::malformed :
           uint64_t(given.position) + given.n_rows > n_tokens ? Status::no_room :
                                                                Status::ok;
}

// Whether a header is the answer to that task: of so many bytes, or a refusal without any.
OA_HD constexpr bool answers(const ResultHeader & header, uint64_t epoch, uint32_t number, size_t nbytes) {
    return header.epoch == epoch && header.number == number &&
           header.nbytes == (header.status == Status::ok ? nbytes : 0);
}

// How many rows such a task has room for, in slots of so many bytes with their headers. n_rows does not matter.
OA_HD inline size_t rows_of_a_task(AttendTask task, size_t task_nbytes, size_t result_nbytes) {
    task.n_rows         = 0;
    const size_t before = AttendLayout(task).nbytes + 4 * 64; // parts begin on multiples of 64
    task.n_rows         = 1;
    const size_t a_row =
        (size_t(task.n_head + task.n_head_kv) * task.d_k + size_t(task.n_head_kv) * task.d_v) * sizeof(float);
    const size_t room = task_nbytes - line, sent = room > before ? (room - before) / a_row : 0;
    const size_t answer = answer_nbytes(task), answered = answer > 0 ? (result_nbytes - line) / answer : sent;
    return sent < answered ? sent : answered;
}

// Fast 64-bit checksums against torn, stale and damaged slots; no protection against an attacker, who has to be the
// same user. Always of private memory, before what is there is copied into a slot or after it was copied out of one:
// else a slot that changes in between would go unnoticed.

constexpr uint64_t checksum_multiple = 0x9e3779b97f4a7c15ull;

OA_HD constexpr uint64_t mixed(uint64_t sum, uint64_t word) {
    sum = (sum ^ word) * checksum_multiple;
    return sum ^ (sum >> 29);
}

// Of the header of a task or a result, its own checksum left out. Between GPUs there is no other: over payloads it
// would take another pass over all of K, V and results. So it notices headers that are torn, stale, or of another
// layout, but not a payload that changed in the other device's memory; whether payloads arrive at all is what the ping
// at attach tries.
template <class AnyHeader> OA_HD inline uint64_t header_checksum(AnyHeader header) {
    static_assert(sizeof(AnyHeader) % sizeof(uint64_t) == 0, "whole words");
    header.checksum = 0;
    uint64_t words[sizeof(AnyHeader) / sizeof(uint64_t)];
    memcpy(words, &header, sizeof(words));
    uint64_t sum = sizeof(AnyHeader);
    for (uint64_t word : words) {
        sum = mixed(sum, word);
    }
    return sum;
}

// Of a header, and of the payload of header.nbytes: what CPUs use.
template <class AnyHeader> uint64_t checksum(const AnyHeader & header, const void * payload) {
    constexpr size_t n_lanes        = 4;
    uint64_t         lanes[n_lanes] = { header.nbytes, header_checksum(header), 2, 3 };
    const char *     at             = static_cast<const char *>(payload);
    size_t           left           = header.nbytes;
    for (; left >= sizeof(lanes); left -= sizeof(lanes), at += sizeof(lanes)) {
        uint64_t words[n_lanes];
        memcpy(words, at, sizeof(words));
        for (size_t i = 0; i < n_lanes; ++i) {
            lanes[i] = (lanes[i] ^ words[i]) * checksum_multiple;
            lanes[i] ^= lanes[i] >> 32;
        }
    }
    uint64_t sum = 0;
    for (uint64_t lane : lanes) {
        sum = mixed(sum, lane);
    }
    for (; left > 0; --left, ++at) {
        sum = mixed(sum, uint8_t(*at));
    }
    return sum;
}

} // namespace oa::weave
