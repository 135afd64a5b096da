// What a node of a graph must be like for its operator: as ggml.c's builders make it. Kernels rely on it.
#pragma once

#include "ggml.h"

namespace oa_rpc {

// Is the operator one that comes by network, and are the sources that it cannot do without there?
bool has_sources(const ggml_tensor * node);

// Shapes, types and parameters; after has_sources.
bool fits_sources(const ggml_tensor * node);

} // namespace oa_rpc
