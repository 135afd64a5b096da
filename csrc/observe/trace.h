// A timeline of the scheduler: what each device computed, and what was copied or waited for, from when to when.
// Off (the default) it costs one relaxed load per split and per input of a split.
//
// While it is on, every split and every copy is waited for where it is handed to its device: what runs after one
// another without the trace still does. What the copier of a weight stream does meanwhile is seen beside it, and so is
// an accelerator's part of a divided weight, which another thread waits for while the host computes its own.
#pragma once

#include "ggml-backend.h"

#include <stdbool.h>
#include <stdint.h>

#ifdef __cplusplus
#include <string>
#include <vector>

struct oa_trace_span {
    std::string device; // that computed, or that data was copied to
    std::string what;   // "compute"; "stream", "upload", "data": copies by a weight stream, by llama.cpp of weights and
                        // of activations and masks; "wait" for a streamed weight
    std::string name;   // of the first node, or of the tensor that was copied
    size_t      nbytes; // copied
    double      begin;  // seconds of the monotonic clock
    double      end;
};

GGML_API void oa_trace_set_enabled(bool enabled);
GGML_API std::vector<oa_trace_span> oa_trace_take(); // the spans so far, by their end; empties the list
GGML_API void oa_trace_add(const char * device, const char * what, const char * name, size_t nbytes, int64_t begin_ns);

extern "C" {
#endif

// Nanoseconds of the monotonic clock; 0 while the trace is off, which the functions below take as "not begun".
GGML_API int64_t oa_trace_now(void);

// `graph` was handed to `backend`: waits until it is done; `beside`: until it and the next one are, in the next call.
GGML_API void oa_trace_computed(int64_t begin, ggml_backend_t backend, const struct ggml_cgraph * graph, bool beside);

// `input` was copied to `backend`: waits until it is there.
GGML_API void oa_trace_copied(int64_t begin, ggml_backend_t backend, const struct ggml_tensor * input);

#ifdef __cplusplus
}
#endif
