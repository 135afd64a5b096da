// Gives a model's products to our kernels or to the twins of their weights, once its graph is built (patch 0019).
#pragma once

#include "ggml.h"

// Marks the products that CPUs compute of the weights whose realisation is `tiled`. Those that our kernels refuse read
// the weight's twin, where it has one (twins.h).
void oa_products_mark(ggml_cgraph * graph);
