// The marks (tensor_flags.h) that a load by a backend map leaves on weights and KV caches, and by which the scheduler
// knows afterwards what the table said.
#pragma once

#include "backend_map.h"

// Marks a loaded weight, which lies at `offset` of the open file `fd` (-1: in none). Nothing without a map.
void oa_backend_map_mark(ggml_tensor * weight, const oa_weight_place & place, int fd, size_t offset);

// Whether the model, known by any of its weights, obeys a map. Upstream pins some norms to the device of their layer's
// KV cache; under a map they run beside what they read and feed, as planned.
bool oa_backend_map_obeyed(const ggml_tensor * weight);

// Marks the KV cache of a layer (k or v may be null), which will be in memory of type `buft`, if the model obeys a map.
void oa_backend_map_mark_cache(const ggml_tensor * embedding, ggml_backend_buffer_type_t buft, ggml_tensor * k,
                               ggml_tensor * v);
