// In-place timing: how long every node of a real graph took on the backend that ran it.
// Off (the default) it costs one relaxed load per graph on the CPU and per node on CUDA.
// CPU: thread 0 after each node's barrier. CUDA: events on the stream, see op_timer_cuda.h.
#pragma once

#include "ggml.h"

#include <stdbool.h>

#ifdef __cplusplus
#include <string>
#include <vector>

struct oa_op_time {
    std::string device; // "CPU" or "CUDA<n>"
    std::string node;   // name of the graph node, "ffn_up-3"; a fused group carries its first node's name
    std::string op;     // "MUL_MAT"
    std::string weight; // name of the first operand ("blk.3.ffn_up.weight"), which may be an activation
    double      seconds = 0.0;
    double      nbytes; // that it must read and write at least
};

GGML_API void       oa_op_timer_set_enabled(bool enabled);
GGML_API oa_op_time oa_op_timer_describe(const char * device, const struct ggml_tensor * node);
GGML_API void       oa_op_timer_record(oa_op_time record);
GGML_API std::vector<oa_op_time> oa_op_timer_take(); // the records so far, in order of completion; empties the list

// Backends with asynchronous timers register a function that waits for and records what is pending.
GGML_API void oa_op_timer_add_flush(void (*flush)());

extern "C" {
#endif

GGML_API bool oa_op_timer_enabled(void);
GGML_API void oa_op_timer_cpu_begin(void);
GGML_API void oa_op_timer_cpu_node(const struct ggml_tensor * node);

#ifdef __cplusplus
}
#endif
