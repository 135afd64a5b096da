// The marks (tensor_flags.h) that a load by a backend map leaves on weights and KV caches, and by which the scheduler
// knows afterwards what the table said.
#pragma once

#include "backend_map.h"

// Marks a loaded weight, which lies at `offset` of the open file `fd` (-1: in none). Without a map, only whether it is
// a lazy table: rows are read from the file when they are wanted. Throws where a map has such a table on an
// accelerator.
void oa_backend_map_mark(ggml_tensor * weight, const oa_weight_place & place, int fd, size_t offset, bool lazy);

// Whether the model, known by any of its weights, obeys a map. Upstream pins some norms to the device of their layer's
// KV cache; under a map they run beside what they read and feed, as planned.
bool oa_backend_map_obeyed(const ggml_tensor * weight);

// Whether an operator of layer il runs on its layer's device, whatever reads it: a norm, or the sum at the layer's end,
// of a model whose layers are whole. The scheduler would put that sum on the next layer's device, which would be sent
// both of its terms, and that layer's first norm on the device before.
bool oa_backend_map_pins(const ggml_tensor * embedding, const char * op, int il);

// Whether an operator that runs elsewhere than its layer's KV cache stays fused: where the model obeys a map and the
// layer's device has the operator, too. Upstream takes the difference for a device without it.
bool oa_backend_map_fuses(const ggml_tensor * weight, ggml_backend_dev_t layer, const ggml_tensor * fused);

// Marks the KV cache of a layer (k or v may be null), which will be in memory of type `buft`, if the model obeys a map.
void oa_backend_map_mark_cache(const ggml_tensor * embedding, ggml_backend_buffer_type_t buft, ggml_tensor * k,
                               ggml_tensor * v);
