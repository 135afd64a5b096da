// Words that the rules for operators are written in. Sizes come from the network: products of them are 128 bits wide.
#pragma once

#include "ggml-impl.h"

#include <initializer_list>

namespace oa_rpc {

using tensor = const ggml_tensor *;
__extension__ typedef __int128 wide; // sizes and parameters from the network multiply without overflow

inline bool is(tensor x, std::initializer_list<wide> ne) {
    int i = 0;
    for (const wide n : ne) {
        if (x->ne[i++] != n) {
            return false;
        }
    }
    for (; i < GGML_MAX_DIMS; ++i) {
        if (x->ne[i] != 1) {
            return false;
        }
    }
    return true;
}

inline bool f32(std::initializer_list<tensor> all) {
    for (tensor x : all) {
        if (x->type != GGML_TYPE_F32) {
            return false;
        }
    }
    return true;
}

inline bool floats(tensor x) {
    return x->type == GGML_TYPE_F32 || x->type == GGML_TYPE_F16;
}

// Whether kernels multiply its rows: not of integers, of doubles, and of the types that activations alone have.
inline bool multiplies(tensor x) {
    return floats(x) || x->type == GGML_TYPE_BF16 ||
           (ggml_is_quantized(x->type) && x->type != GGML_TYPE_Q8_1 && x->type != GGML_TYPE_Q8_K);
}

inline bool contiguous(std::initializer_list<tensor> all) {
    for (tensor x : all) {
        if (!ggml_is_contiguous(x)) {
            return false;
        }
    }
    return true;
}

// As contiguous, and in dimensions of one element too: kernels that step through planes use those strides.
inline bool packed(tensor x) {
    for (int i = 1; i < GGML_MAX_DIMS; ++i) {
        if (x->nb[i] != (i == 1 ? ggml_row_size(x->type, x->ne[0]) : x->nb[i - 1] * x->ne[i - 1])) {
            return false;
        }
    }
    return x->nb[0] == ggml_type_size(x->type);
}

// Rows one after the other, as far apart as nb[1] says, in dimensions of one element too: where kernels step from row
// to row, whatever dimension they are in, and ggml's own checks leave out strides of dimensions of one element.
inline bool rows_follow(tensor x) {
    wide step = wide(x->nb[1]) * x->ne[1];
    for (int i = 2; i < GGML_MAX_DIMS; step *= x->ne[i++]) {
        if (x->ne[i] > 1 && wide(x->nb[i]) != step) {
            return false;
        }
    }
    return true;
}

inline bool repeats(tensor small, tensor large) {
    return ggml_is_empty(small) ? ggml_is_empty(large) : ggml_can_repeat(small, large);
}

inline bool divides(int64_t small, int64_t large) {
    return small > 0 && large % small == 0;
}

inline wide product(tensor x) {
    return wide(x->ne[0]) * x->ne[1] * x->ne[2] * x->ne[3]; // at most 2^62, by oa_rpc_check_tensor
}

inline int32_t parameter(tensor x, int i) {
    return x->op_params[i];
}

// An enumeration.
inline bool below(tensor x, int i, int32_t count) {
    return parameter(x, i) >= 0 && parameter(x, i) < count;
}

// ggml_calc_conv_output_size; 0 for parameters that no builder makes.
inline wide convolved(int64_t in, int64_t kernel, int32_t stride, int32_t padding, int32_t dilation) {
    if (stride <= 0 || padding < 0 || dilation < 0 || kernel <= 0) {
        return 0;
    }
    return (wide(in) + 2 * wide(padding) - wide(dilation) * (kernel - 1) - 1) / stride + 1;
}

inline bool like_first(tensor d) {
    return ggml_are_same_shape(d, d->src[0]) && d->type == d->src[0]->type;
}

} // namespace oa_rpc
