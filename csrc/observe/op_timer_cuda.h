// The CUDA half of op_timer.h: an event after every node, read when the records are taken.
// Needs CUDA graphs off while it runs (the patch sees to it): a replayed graph has no per-node events.
#pragma once

#include "op_timer.h"

#include <cuda_runtime.h>

// Call with node = nullptr before the first node of a graph, then after every node.
void oa_op_timer_cuda(int device, cudaStream_t stream, const ggml_tensor * node);
