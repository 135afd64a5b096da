// Marks a model's attention for our kernels, once its graph is built (patch 0018).
#pragma once

#include "ggml.h"

// Marks all fused attention of the graph that has no mark yet, if the model's token embedding says so. Devices other
// than CPUs ignore marks.
void oa_attend_mark(const ggml_tensor * embedding, ggml_cgraph * graph);
