// Marks a model's products for our kernels, once its graph is built (patch 0019).
#pragma once

#include "ggml.h"

// Marks the products of the weights whose realisation is `tiled`. Devices other than CPUs ignore marks.
void oa_products_mark(ggml_cgraph * graph);
