// Streamed weights: a weight whose home is the host is copied into a slot of device memory ahead of the operators that
// read it, by a thread of its own, while the device computes. One stream per scheduler, one lane per device.
// Source of the idea: the preload mechanism of Tree TP (docs/sources.md, 2). Hooks: patch 0006.
//
// Invariants: the items of a lane are copied and read in the order of the graph; item i uses slot i % n_slots; a slot
// is written only after the split that reads its last tenant has finished. A graph without items touches nothing, so
// what was copied ahead for the next micro-batch survives decode steps in between.
#pragma once

#include "ggml-backend.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct oa_weight_stream * oa_weight_stream_t;

GGML_API oa_weight_stream_t oa_stream_new(void);
GGML_API void               oa_stream_free(oa_weight_stream_t stream);

// Whether `op` runs on an accelerator because it has so many tokens that `weight` is streamed there.
GGML_API bool oa_stream_wanted(const struct ggml_tensor * op, const struct ggml_tensor * weight);

// While a graph is split: forget the last one; whether `copy` (may be null) is a streamed weight's that an earlier
// split reads, so that its slot may be somebody else's by now; a weight whose `copy` the split reads (nothing happens
// unless it is streamed).
GGML_API void oa_stream_reset(oa_weight_stream_t stream);
GGML_API bool oa_stream_stale(oa_weight_stream_t stream, const struct ggml_tensor * copy, int split);
GGML_API void oa_stream_add(oa_weight_stream_t stream, struct ggml_tensor * weight, struct ggml_tensor * copy,
                            int split, int backend_id, ggml_backend_t backend, ggml_backend_buffer_type_t buft);

// Memory. Slots are one buffer per device, outside of the graph allocator, which leaves the copies alone after either:
// a dry run, after which the size is known; the real thing, false when there is not enough.
GGML_API void   oa_stream_plan(oa_weight_stream_t stream);
GGML_API bool   oa_stream_allocate(oa_weight_stream_t stream);
GGML_API size_t oa_stream_size(oa_weight_stream_t stream, int backend_id); // bytes

enum oa_stream_state {
    OA_STREAM_NONE,   // it is not streamed
    OA_STREAM_READY,  // it is in its slot
    OA_STREAM_FAILED, // it could not be read; the computation must stop (oa_stream_take_error says why)
};

// While the splits of a graph are computed: start copying; wait until the weight `input` of the split is in its slot;
// the split has been handed to the device; copy ahead for the next micro-batch.
GGML_API void                 oa_stream_begin(oa_weight_stream_t stream);
GGML_API enum oa_stream_state oa_stream_wait(oa_weight_stream_t stream, const struct ggml_tensor * input, int split);
GGML_API void                 oa_stream_submitted(oa_weight_stream_t stream, int split);
GGML_API void                 oa_stream_end(oa_weight_stream_t stream);

#ifdef __cplusplus
}

#include <string>
#include <vector>

// Why the last computation of this process failed in a stream, and nothing the second time; and that one did, in
// another copy of weights.
GGML_API std::string oa_stream_take_error();
GGML_API void        oa_stream_fail(const std::string & error);

// Every lane that exists.
struct oa_stream_lane_info {
    std::string device;
    size_t      slots_nbytes;             // device memory
    size_t      pinned_nbytes, pin_limit; // host memory that keeps weights
    bool        staging_pinned;
    std::string note; // why weights are not (all) copied from pinned memory
};
GGML_API std::vector<oa_stream_lane_info> oa_stream_lanes();
#endif
