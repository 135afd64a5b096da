// Rules of operators that slide, pad or resize: outputs whose size follows from parameters.
#include "rpc_rules.h"

#include <algorithm>
#include <cstdlib>

namespace oa_rpc {

bool im2col(tensor d) {
    tensor     a = d->src[0], b = d->src[1];
    const bool two = parameter(d, 6) == 1;
    const wide w   = convolved(b->ne[0], a->ne[0], parameter(d, 0), parameter(d, 2), parameter(d, 4));
    const wide h   = two ? convolved(b->ne[1], a->ne[1], parameter(d, 1), parameter(d, 3), parameter(d, 5)) : b->ne[2];
    const wide row = two ? wide(a->ne[2]) * a->ne[1] * a->ne[0] : wide(a->ne[1]) * a->ne[0];
    return w > 0 && h > 0 && (two ? a->ne[2] == b->ne[2] : a->ne[1] == b->ne[1] && b->ne[3] == 1) && floats(b) &&
           floats(d) && is(d, { row, w, h, two ? b->ne[3] : 1 });
}

bool conv_2d(tensor d) {
    tensor     a = d->src[0], b = d->src[1];
    const wide w = convolved(b->ne[0], a->ne[0], parameter(d, 0), parameter(d, 2), parameter(d, 4));
    const wide h = convolved(b->ne[1], a->ne[1], parameter(d, 1), parameter(d, 3), parameter(d, 5));
    return w > 0 && h > 0 && a->ne[2] == b->ne[2] && f32({ b, d }) && is(d, { w, h, a->ne[3], b->ne[3] });
}

bool conv_2d_dw(tensor d) {
    tensor     a = d->src[0], b = d->src[1];
    const wide w = convolved(b->ne[0], a->ne[0], parameter(d, 0), parameter(d, 2), parameter(d, 4));
    const wide h = convolved(b->ne[1], a->ne[1], parameter(d, 1), parameter(d, 3), parameter(d, 5));
    return w > 0 && h > 0 && a->ne[2] == 1 && a->ne[3] == b->ne[2] && f32({ b, d }) &&
           is(d, { w, h, b->ne[2], b->ne[3] });
}

bool conv_transpose_1d(tensor d) {
    tensor        a = d->src[0], b = d->src[1];
    const int32_t s = parameter(d, 0);
    return s > 0 && parameter(d, 1) == 0 && parameter(d, 2) == 1 && b->ne[2] == 1 && b->ne[3] == 1 &&
           a->ne[2] == b->ne[1] && a->ne[3] == 1 && f32({ b, d }) &&
           is(d, { wide(b->ne[0] - 1) * s + a->ne[0], a->ne[1], b->ne[2], 1 });
}

bool conv_transpose_2d(tensor d) {
    tensor        a = d->src[0], b = d->src[1];
    const int32_t s = parameter(d, 0);
    return s > 0 && a->ne[3] == b->ne[2] && f32({ b, d }) &&
           is(d, { wide(b->ne[0] - 1) * s + a->ne[0], wide(b->ne[1] - 1) * s + a->ne[1], a->ne[2], b->ne[3] });
}

bool col2im_1d(tensor d) {
    tensor        a = d->src[0];
    const int32_t s = parameter(d, 0), oc = parameter(d, 1), p = parameter(d, 2);
    return s > 0 && oc > 0 && p >= 0 && a->ne[2] == 1 && a->ne[3] == 1 && divides(oc, a->ne[0]) && contiguous({ a }) &&
           d->type == a->type && is(d, { wide(a->ne[1] - 1) * s + a->ne[0] / oc - 2 * wide(p), oc });
}

bool pool_1d(tensor d) {
    tensor        a = d->src[0];
    const int32_t k = parameter(d, 1), s = parameter(d, 2), p = parameter(d, 3);
    return k > 0 && s > 0 && p >= 0 && below(d, 0, GGML_OP_POOL_COUNT) && f32({ d }) && floats(a) && packed(a) &&
           contiguous({ d }) && is(d, { (a->ne[0] + 2 * wide(p) - k) / s + 1, a->ne[1], a->ne[2], a->ne[3] });
}

bool pool_2d(tensor d) {
    tensor a = d->src[0];
    for (int i = 1; i <= 6; ++i) { // kernels, strides, paddings
        if (parameter(d, i) < (i <= 4 ? 1 : 0) || parameter(d, i) > 1 << 20) {
            return false;
        }
    }
    return below(d, 0, GGML_OP_POOL_COUNT) && f32({ d }) && floats(a) && packed(a) && contiguous({ d }) &&
           is(d, { d->ne[0], d->ne[1], a->ne[2], a->ne[3] });
}

bool upscale(tensor d) {
    return f32({ d, d->src[0] }) && !ggml_is_empty(d) && !ggml_is_empty(d->src[0]) &&
           (parameter(d, 0) & 0xff) < GGML_SCALE_MODE_COUNT;
}

bool pad(tensor d) {
    tensor a = d->src[0];
    wide   ne[GGML_MAX_DIMS];
    for (int i = 0; i < GGML_MAX_DIMS; ++i) {
        ne[i] = wide(a->ne[i]) + parameter(d, 2 * i) + parameter(d, 2 * i + 1);
    }
    const bool circular = parameter(d, 8) != 0; // it divides by the lengths; else nothing of an empty source is read
    return d->type == a->type && !(circular && ggml_is_empty(a)) && is(d, { ne[0], ne[1], ne[2], ne[3] });
}

bool pad_reflect_1d(tensor d) {
    tensor        a  = d->src[0];
    const int32_t p0 = parameter(d, 0), p1 = parameter(d, 1);
    return p0 >= 0 && p1 >= 0 && p0 < a->ne[0] && p1 < a->ne[0] && contiguous({ a }) && f32({ a, d }) &&
           is(d, { wide(a->ne[0]) + p0 + p1, a->ne[1], a->ne[2], a->ne[3] });
}

bool roll(tensor d) {
    for (int i = 0; i < GGML_MAX_DIMS; ++i) {
        if (std::abs(int64_t(parameter(d, i))) >= std::max<int64_t>(d->ne[i], 1)) {
            return false;
        }
    }
    return like_first(d);
}

bool timestep_embedding(tensor d) {
    return f32({ d, d->src[0] }) && parameter(d, 0) > 0 && is(d, { parameter(d, 0), d->src[0]->ne[0] });
}

} // namespace oa_rpc
