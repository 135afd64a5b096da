// What the kernels of a sender (send.h) find in the memory of its device. Launches of one sender never overlap.
#pragma once

#include "block.h"

namespace oa::weave::cuda {

// Why a sender has failed.
enum class Failure : uint32_t {
    none,
    late,       // the receiver has not answered in time
    aborted,    // the host wants an end
    damaged,    // an answer that is none
    refused,    // SenderReport::status says why
    lost_count, // more tasks than slots
    no_way,     // what is written on one side does not arrive on the other
};

// In host memory that the device can address.
struct SenderReport {
    uint32_t abort;   // set by the host: waits end
    uint32_t failure; // set by the device, once: Failure
    uint32_t status;  // of a refusal
    uint32_t number;  // of the task
    uint64_t waited;  // nanoseconds, in total
};

// The sequences of an iteration, for all layers; the host's, between two graphs.
struct SendPlan {
    uint32_t     n_sequences;
    uint32_t     first_row[max_sequences]; // of all rows
    SequenceRows rows[max_sequences];
};

struct SenderState {
    // Fixed, the host's.
    char *         inbox; // Duplex
    char *         outbox;
    uint64_t       task_nbytes, result_nbytes; // of a slot, its header included
    uint64_t       patience;                   // nanoseconds
    uint64_t       epoch;
    SenderReport * report;
    uint32_t       n_slots, base;
    SendPlan       plan; // of the iteration, the host's

    uint32_t arrived; // of the launch; 0 between launches
    uint32_t failed;
    uint32_t fetched; // number of the last task whose result was fetched
    uint64_t waited;
    alignas(8) unsigned char channel[16]; // Duplex
    alignas(8) unsigned char ring[32];    // SenderRing
};

// Rows of one layer, or some of them. In a captured graph all of this stays; what changes is in the plan. Rows and the
// distances between them are multiples of 16 bytes.
struct SendCall {
    AttendTask    task;  // n_rows is of this task; n_sequences is found out
    const float * sinks; // n_head, or null
    const float * q;     // of the plan's first row
    const float * k;
    const float * v;
    size_t        q_stride, k_stride, v_stride; // floats from row to row
    uint32_t      first;                        // row of the plan that is this task's first
};

// Where the rows of one task go.
struct FetchCall {
    float *  out;
    uint32_t n_floats; // a multiple of 4
};

} // namespace oa::weave::cuda
