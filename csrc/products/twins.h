// Weights that are in memory twice (`repacked+tiled`): the weight itself lies plain, as in the file, and is computed by
// our kernels where there are many columns (own_products.h). Its twin lies in the faster layout of ggml-cpu that the
// weight would have if it were `repacked`, and computes products with few columns. Hooks: patch 0021.
//
// A twin is a tensor of the model: it is counted, allocated and freed with the model's others, also in a dry run. Which
// of the two an operator reads is decided when its graph is built, by its shape (products_marks.h).
#pragma once

#include "ggml.h"

// While a model is loaded: forget the last load; make the twin of `weight` in a context whose tensors will be allocated
// in the faster layout; fill the twins, once the weights are loaded.
void oa_twins_begin();
void oa_twins_add(ggml_tensor * weight, ggml_context * ctx);
void oa_twins_fill();
