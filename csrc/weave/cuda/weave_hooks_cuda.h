// What patch 0012 calls in ggml-cuda. Without a receiver on that device every hook is a test of a pointer.
//
// OALLAMA_WEAVE_CUDA_RECEIVER (path:quota in bytes[:nodes between polls]): the device whose graph begins first has the
// receiver of this process from then on. There is no other one later: captured graphs hold its polls.
#pragma once

#include <cuda_runtime.h>

// Around the launches of a graph, both outside of captures; `stream` is its main one.
void oa_weave_cuda_begin(int device, cudaStream_t stream);
void oa_weave_cuda_end(int device, cudaStream_t stream);
// After a node on the main stream, not between fork and join; captured where the graph is.
void oa_weave_cuda_poll(int device, cudaStream_t stream);
