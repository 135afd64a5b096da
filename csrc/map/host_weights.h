// How much host memory the weights of a load may take. Repacked weights (a buffer type of ggml-cpu with faster kernels)
// need memory of their own; plain ones can stay in the mapped file. The load in progress is this thread's.
#pragma once

#include "llama.h"

#include <cstddef>

// A load begins: what the host has now is divided between repacked weights and everybody else.
void oa_host_weights_begin();

// Whether a weight of so many bytes gets memory of its own; with `mapped` it can stay in the mapped file instead, and
// is counted as left there. Without a file mapping it has no other place.
bool oa_host_weights_take(size_t nbytes, bool mapped);

// Whether the repacked twin of a plain weight gets memory: of a mapped weight the pages are to stay in memory, too.
bool oa_host_weights_take_twin(size_t nbytes, bool mapped);

// Whether a copy of a part of a weight gets memory. Beside a weight that is read from the file into memory (not
// `mapped`) it would be memory twice.
bool oa_host_weights_take_part(size_t nbytes, bool mapped);

// Bytes of host weights that the last load on this thread left in the mapped file because memory is short, instead of
// repacking them for the CPU's faster kernels.
LLAMA_API size_t oa_host_weights_left_mapped();
