// Marks a model's attention for our kernels, once its graph is built (patch 0018).
#pragma once

#include "ggml.h"

// Marks all fused attention of the graph if the model's token embedding says so, but that of batches with guests: what
// builds it does (weave/guests/guest_graph.cpp). Devices other than CPUs ignore marks.
void oa_attend_mark(const ggml_tensor * embedding, ggml_cgraph * graph);
