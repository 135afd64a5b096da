// Weights of a rank that computes on the CPU and keeps few of them in memory (docs/sources.md, 2): they lie in a file
// of their own, which is mapped. While a piece of the graph computes, a thread reads in the weights of the next one;
// those of a piece that is done are given back.
//
// Invariant: what is given back is still in the file, so a wrong guess of what comes next costs time, never a value.
#pragma once

#include "ggml-backend-impl.h"

// Throws std::runtime_error where there is no disk to keep weights on.
void oa_window_check();

// How many ranks share the host's memory. Where it cannot cache their weights some pieces stay there and the others are
// read from the disk each time: else the cache would drop each piece right before its next use. 0: nothing is known.
void oa_window_share(int n_ranks);

// Buffers of weights are mapped files, all others `real`'s: a model's weights are allocated before there is a backend.
ggml_backend_buffer_type_t oa_window_buffer_type(ggml_backend_dev_t dev, ggml_backend_buffer_type_t real);

// From now on what this CPU backend computes moves the window.
void oa_window_watch(ggml_backend_t backend);
