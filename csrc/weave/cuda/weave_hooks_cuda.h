// What patch 0012 calls in ggml-cuda. Without a receiver on that device, and without senders, every hook is a test of a
// word.
//
// OALLAMA_WEAVE_CUDA_RECEIVER (path:quota in bytes[:decode:prompt:few], Distance of receiver_cuda.h): the device whose
// graph begins first has the receiver of this process from then on. There is no other one later: captured graphs hold
// its looks. OALLAMA_WEAVE_CUDA_WORK (conditional, plain): Working of receiver_cuda.h.
#pragma once

#include "ggml.h"
#include "guest_sender.h"

#include <cuda_runtime.h>

// Around the launches of a graph, both outside of captures; `stream` is its main one. In a run of the scheduler (see
// graph_run.h) only the first of its graphs begins, and the end is the run's.
void oa_weave_cuda_begin(int device, cudaStream_t stream);
void oa_weave_cuda_end(int device);
// After nodes that were launched together on the main stream, not between fork and join; captured where the graph is.
// None: after the last one of the graph.
void oa_weave_cuda_poll(int device, cudaStream_t stream, ggml_tensor * const * nodes, int n_nodes);

// A hot model's sender. In the registry as oa::weave::new_sender_name.
std::unique_ptr<oa::weave::GuestSender> oa_weave_new_cuda_sender(int device, const std::string & path,
                                                                 const oa::weave::OpenTask &      shape,
                                                                 const oa::weave::SenderOptions & options);
// Whether a custom operator is one of such a sender (guest_op.h), on its device.
bool oa_weave_cuda_supports(int device, const ggml_tensor * node);
// Before a graph, outside of captures: the rows of its guests.
void oa_weave_cuda_plan(cudaStream_t stream, ggml_tensor * const * nodes, int n_nodes);
// The launches of such an operator; captured where the graph is. False: it is another one.
bool oa_weave_cuda_forward(cudaStream_t stream, ggml_tensor * node);
