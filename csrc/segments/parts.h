// Parts of divided weights as tensors.
#pragma once

#include "ggml.h"

#include <string>

// A part's shape: `count` values along an axis of the weight, of its type; it owns no memory.
ggml_tensor oa_part_of(const ggml_tensor & weight, int axis, int64_t count);

// The layer whose weight has this name, as in "blk.3.ffn_up_exps.weight"; -1: none.
int oa_layer_of(const std::string & name);

// The part as a tensor of `ctx`, named for where it is.
ggml_tensor * oa_create_part(const ggml_tensor & weight, const ggml_tensor & part, const char * where,
                             ggml_context * ctx);
