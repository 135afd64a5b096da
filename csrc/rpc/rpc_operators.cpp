#include "rpc_operators.h"

#include "ggml-impl.h"

#include <cmath>
#include <initializer_list>

namespace oa_rpc {

namespace {

using t = const ggml_tensor *;
__extension__ typedef __int128 wide; // sizes and parameters from the network multiply without overflow

bool is(t x, std::initializer_list<wide> ne) {
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

bool f32(std::initializer_list<t> all) {
    for (t x : all) {
        if (x->type != GGML_TYPE_F32) {
            return false;
        }
    }
    return true;
}

bool floats(t x) {
    return x->type == GGML_TYPE_F32 || x->type == GGML_TYPE_F16;
}

bool contiguous(std::initializer_list<t> all) {
    for (t x : all) {
        if (!ggml_is_contiguous(x)) {
            return false;
        }
    }
    return true;
}

// As contiguous, and in dimensions of one element too: kernels that step through planes use those strides.
bool packed(t x) {
    for (int i = 1; i < GGML_MAX_DIMS; ++i) {
        if (x->nb[i] != (i == 1 ? ggml_row_size(x->type, x->ne[0]) : x->nb[i - 1] * x->ne[i - 1])) {
            return false;
        }
    }
    return x->nb[0] == ggml_type_size(x->type);
}

bool repeats(t small, t large) {
    return ggml_is_empty(small) ? ggml_is_empty(large) : ggml_can_repeat(small, large);
}

bool divides(int64_t small, int64_t large) {
    return small > 0 && large % small == 0;
}

wide product(t x) {
    return wide(x->ne[0]) * x->ne[1] * x->ne[2] * x->ne[3]; // at most 2^62, by oa_rpc_check_tensor
}

int32_t parameter(t x, int i) {
    return x->op_params[i];
}

bool below(t x, int i, int32_t count) {
    return parameter(x, i) >= 0 && parameter(x, i) < count;
} // an enumeration

// ggml_calc_conv_output_size; 0 for parameters that no builder makes.
wide convolved(int64_t in, int64_t kernel, int32_t stride, int32_t padding, int32_t dilation) {
    if (stride <= 0 || padding < 0 || dilation < 0 || kernel <= 0) {
        return 0;
    }
    return (wide(in) + 2 * wide(padding) - wide(dilation) * (kernel - 1) - 1) / stride + 1;
}

bool like_first(t d) {
    return ggml_are_same_shape(d, d->src[0]) && d->type == d->src[0]->type;
}

bool binary(t d) {
    return ggml_are_same_shape(d, d->src[0]) && repeats(d->src[1], d);
}

bool add_id(t d) {
    t a = d->src[0], b = d->src[1], ids = d->src[2];
    return like_first(d) && f32({ a, b }) && a->ne[0] == b->ne[0] && a->ne[1] == ids->ne[0] && a->ne[2] == ids->ne[1] &&
           a->ne[3] == 1 && ids->type == GGML_TYPE_I32;
}

bool unary(t d) {
    return like_first(d) && below(d, 0, GGML_UNARY_OP_COUNT);
}

bool glu(t d) {
    t a = d->src[0], b = d->src[1];
    if (!below(d, 0, GGML_GLU_OP_COUNT) || d->type != a->type) {
        return false;
    }
    if (b) {
        return ggml_are_same_shape(a, b) && a->type == b->type && ggml_are_same_shape(d, a);
    }
    return is(d, { a->ne[0] / 2, a->ne[1], a->ne[2], a->ne[3] });
}

bool group_norm(t d) {
    return like_first(d) && parameter(d, 0) > 0;
}

bool sum(t d) {
    return product(d) == 1 && d->type == d->src[0]->type;
}

bool sum_rows(t d) {
    t a = d->src[0];
    return is(d, { 1, a->ne[1], a->ne[2], a->ne[3] }) && d->type == a->type && a->nb[0] == ggml_type_size(a->type);
}

bool argmax(t d) {
    t a = d->src[0];
    return is(d, { a->ne[1] }) && a->ne[2] == 1 && a->ne[3] == 1 && d->type == GGML_TYPE_I32 && f32({ a });
}

bool argsort(t d) {
    return ggml_are_same_shape(d, d->src[0]) && d->type == GGML_TYPE_I32 && f32({ d->src[0] }) &&
           below(d, 0, GGML_SORT_ORDER_DESC + 1);
}

bool top_k(t d) {
    t a = d->src[0];
    return d->ne[0] <= a->ne[0] && is(d, { d->ne[0], a->ne[1], a->ne[2], a->ne[3] }) && d->type == GGML_TYPE_I32 &&
           f32({ a });
}

bool repeat(t d) {
    return repeats(d->src[0], d) && d->type == d->src[0]->type;
}

bool concat(t d) {
    t         a = d->src[0], b = d->src[1];
    const int dim = parameter(d, 0);
    if (dim < 0 || dim >= GGML_MAX_DIMS || a->type != b->type || a->type != d->type) {
        return false;
    }
    for (int i = 0; i < GGML_MAX_DIMS; ++i) {
        if (i == dim ? d->ne[i] != a->ne[i] + b->ne[i] : d->ne[i] != a->ne[i] || d->ne[i] != b->ne[i]) {
            return false;
        }
    }
    return true;
}

bool mul_mat(t d) {
    t a = d->src[0], b = d->src[1];
    return a->ne[0] == b->ne[0] && divides(a->ne[2], b->ne[2]) && divides(a->ne[3], b->ne[3]) && f32({ d }) &&
           !ggml_is_transposed(a) && is(d, { a->ne[1], b->ne[1], b->ne[2], b->ne[3] });
}

bool mul_mat_id(t d) {
    t as = d->src[0], b = d->src[1], ids = d->src[2];
    return !ggml_is_transposed(as) && ids->type == GGML_TYPE_I32 && as->ne[3] == 1 && b->ne[3] == 1 &&
           ids->ne[2] == 1 && ids->ne[3] == 1 && ids->ne[1] == b->ne[2] && as->ne[0] == b->ne[0] &&
           divides(b->ne[1], ids->ne[0]) && f32({ d }) && is(d, { as->ne[1], ids->ne[0], b->ne[2], 1 });
}

bool out_prod(t d) {
    t a = d->src[0], b = d->src[1];
    return a->ne[1] == b->ne[1] && divides(a->ne[2], b->ne[2]) && divides(a->ne[3], b->ne[3]) && f32({ b, d }) &&
           is(d, { a->ne[0], b->ne[0], b->ne[2], b->ne[3] });
}

// ggml_set and ggml_acc: the second source lands in the first, seen through strides and an offset.
bool set(t d) {
    t    a = d->src[0], b = d->src[1];
    wide end = wide(ggml_type_size(d->type)) * b->ne[0] + parameter(d, 3);
    for (int i = 0; i < 4; ++i) {
        end += i < 3 ? wide(parameter(d, i)) * (b->ne[i + 1] - 1) : 0;
        if (parameter(d, i) < 0 || parameter(d, i) % ggml_type_size(d->type) != 0) {
            return false;
        }
    }
    return like_first(d) && b->type == a->type && contiguous({ a, d }) && b->nb[0] == ggml_type_size(b->type) &&
           !ggml_is_empty(b) && end <= wide(ggml_nbytes(d));
}

bool copy(t d) {
    return product(d) == product(d->src[0]);
}

bool get_rows(t d) {
    t a = d->src[0], b = d->src[1];
    return a->ne[2] == b->ne[1] && a->ne[3] == b->ne[2] && b->ne[3] == 1 && b->type == GGML_TYPE_I32 &&
           d->type == (a->type == GGML_TYPE_I32 ? GGML_TYPE_I32 : GGML_TYPE_F32) &&
           is(d, { a->ne[0], b->ne[0], b->ne[1], b->ne[2] });
}

bool set_rows(t d) {
    t b = d->src[0], c = d->src[1], a = d->src[2];
    return a->ne[0] == b->ne[0] && a->ne[2] == b->ne[2] && a->ne[3] == b->ne[3] && b->ne[1] == c->ne[0] &&
           divides(c->ne[1], b->ne[2]) && divides(c->ne[2], b->ne[3]) && c->ne[3] == 1 && floats(b) &&
           (c->type == GGML_TYPE_I64 || c->type == GGML_TYPE_I32) && ggml_is_contiguous_rows(b) &&
           ggml_is_contiguous_rows(d) && ggml_are_same_shape(d, a) && d->type == a->type;
}

bool diag(t d) {
    t a = d->src[0];
    return a->ne[1] == 1 && d->type == a->type && is(d, { a->ne[0], a->ne[0], a->ne[2], a->ne[3] });
}

bool diag_mask(t d) {
    return like_first(d) && parameter(d, 0) >= 0;
}

bool soft_max(t d) {
    t a = d->src[0], mask = d->src[1], sinks = d->src[2];
    if (mask && (!floats(mask) || !ggml_is_contiguous(mask) || mask->ne[0] != a->ne[0] || mask->ne[1] < a->ne[1] ||
                 !divides(mask->ne[2], a->ne[2]) || !divides(mask->ne[3], a->ne[3]))) {
        return false;
    }
    if (sinks && (!f32({ sinks }) || sinks->ne[0] != a->ne[2])) {
        return false;
    }
    return like_first(d) && f32({ a }) && contiguous({ a, d });
}

bool rope(t d) {
    t             a = d->src[0], b = d->src[1], c = d->src[2];
    const int32_t n_dims = parameter(d, 1), mode = parameter(d, 2), offset = parameter(d, 15);
    const wide    positions = wide(a->ne[2]) * (mode & GGML_ROPE_TYPE_MROPE ? 4 : 1);
    const bool    vision    = mode == GGML_ROPE_TYPE_VISION;
    return like_first(d) && is(b, { positions }) && b->type == GGML_TYPE_I32 && n_dims > 0 && offset >= 0 &&
           wide(n_dims) * (vision ? 2 : 1) + offset <= a->ne[0] && (!c || (f32({ c }) && c->ne[0] >= n_dims / 2));
}

bool im2col(t d) {
    t          a = d->src[0], b = d->src[1];
    const bool two = parameter(d, 6) == 1;
    const wide w   = convolved(b->ne[0], a->ne[0], parameter(d, 0), parameter(d, 2), parameter(d, 4));
    const wide h   = two ? convolved(b->ne[1], a->ne[1], parameter(d, 1), parameter(d, 3), parameter(d, 5)) : b->ne[2];
    const wide row = two ? wide(a->ne[2]) * a->ne[1] * a->ne[0] : wide(a->ne[1]) * a->ne[0];
    return w > 0 && h > 0 && (two ? a->ne[2] == b->ne[2] : a->ne[1] == b->ne[1] && b->ne[3] == 1) && floats(b) &&
           floats(d) && is(d, { row, w, h, two ? b->ne[3] : 1 });
}

bool conv_2d(t d) {
    t          a = d->src[0], b = d->src[1];
    const wide w = convolved(b->ne[0], a->ne[0], parameter(d, 0), parameter(d, 2), parameter(d, 4));
    const wide h = convolved(b->ne[1], a->ne[1], parameter(d, 1), parameter(d, 3), parameter(d, 5));
    return w > 0 && h > 0 && a->ne[2] == b->ne[2] && f32({ b, d }) && is(d, { w, h, a->ne[3], b->ne[3] });
}

bool conv_2d_dw(t d) {
    t          a = d->src[0], b = d->src[1];
    const wide w = convolved(b->ne[0], a->ne[0], parameter(d, 0), parameter(d, 2), parameter(d, 4));
    const wide h = convolved(b->ne[1], a->ne[1], parameter(d, 1), parameter(d, 3), parameter(d, 5));
    return w > 0 && h > 0 && a->ne[2] == 1 && a->ne[3] == b->ne[2] && f32({ b, d }) &&
           is(d, { w, h, b->ne[2], b->ne[3] });
}

bool conv_transpose_1d(t d) {
    t             a = d->src[0], b = d->src[1];
    const int32_t s = parameter(d, 0);
    return s > 0 && parameter(d, 1) == 0 && parameter(d, 2) == 1 && b->ne[2] == 1 && b->ne[3] == 1 &&
           a->ne[2] == b->ne[1] && a->ne[3] == 1 && f32({ b, d }) &&
           is(d, { wide(b->ne[0] - 1) * s + a->ne[0], a->ne[1], b->ne[2], 1 });
}

bool conv_transpose_2d(t d) {
    t             a = d->src[0], b = d->src[1];
    const int32_t s = parameter(d, 0);
    return s > 0 && a->ne[3] == b->ne[2] && f32({ b, d }) &&
           is(d, { wide(b->ne[0] - 1) * s + a->ne[0], wide(b->ne[1] - 1) * s + a->ne[1], a->ne[2], b->ne[3] });
}

bool col2im_1d(t d) {
    t             a = d->src[0];
    const int32_t s = parameter(d, 0), oc = parameter(d, 1), p = parameter(d, 2);
    return s > 0 && oc > 0 && p >= 0 && a->ne[2] == 1 && a->ne[3] == 1 && divides(oc, a->ne[0]) && contiguous({ a }) &&
           d->type == a->type && is(d, { wide(a->ne[1] - 1) * s + a->ne[0] / oc - 2 * wide(p), oc });
}

bool pool_1d(t d) {
    t             a = d->src[0];
    const int32_t k = parameter(d, 1), s = parameter(d, 2), p = parameter(d, 3);
    return k > 0 && s > 0 && p >= 0 && below(d, 0, GGML_OP_POOL_COUNT) && f32({ d }) && floats(a) && packed(a) &&
           contiguous({ d }) && is(d, { (a->ne[0] + 2 * wide(p) - k) / s + 1, a->ne[1], a->ne[2], a->ne[3] });
}

bool pool_2d(t d) {
    t a = d->src[0];
    for (int i = 1; i <= 6; ++i) { // kernels, strides, paddings
        if (parameter(d, i) < (i <= 4 ? 1 : 0) || parameter(d, i) > 1 << 20) {
            return false;
        }
    }
    return below(d, 0, GGML_OP_POOL_COUNT) && f32({ d }) && floats(a) && packed(a) && contiguous({ d }) &&
           is(d, { d->ne[0], d->ne[1], a->ne[2], a->ne[3] });
}

bool upscale(t d) {
    return f32({ d, d->src[0] }) && !ggml_is_empty(d) && !ggml_is_empty(d->src[0]) &&
           (parameter(d, 0) & 0xff) < GGML_SCALE_MODE_COUNT;
}

bool pad(t d) {
    t    a = d->src[0];
    wide ne[GGML_MAX_DIMS];
    for (int i = 0; i < GGML_MAX_DIMS; ++i) {
        ne[i] = wide(a->ne[i]) + parameter(d, 2 * i) + parameter(d, 2 * i + 1);
    }
    return d->type == a->type && !ggml_is_empty(a) && is(d, { ne[0], ne[1], ne[2], ne[3] });
}

bool pad_reflect_1d(t d) {
    t             a  = d->src[0];
    const int32_t p0 = parameter(d, 0), p1 = parameter(d, 1);
    return p0 >= 0 && p1 >= 0 && p0 < a->ne[0] && p1 < a->ne[0] && contiguous({ a }) && f32({ a, d }) &&
           is(d, { wide(a->ne[0]) + p0 + p1, a->ne[1], a->ne[2], a->ne[3] });
}

bool roll(t d) {
    for (int i = 0; i < GGML_MAX_DIMS; ++i) {
        if (std::abs(int64_t(parameter(d, i))) >= std::max<int64_t>(d->ne[i], 1)) {
            return false;
        }
    }
    return like_first(d);
}

bool timestep_embedding(t d) {
    return f32({ d, d->src[0] }) && parameter(d, 0) > 0 && is(d, { parameter(d, 0), d->src[0]->ne[0] });
}

bool arange(t d) {
    return f32({ d }) && contiguous({ d });
} // the kernel compares the number of steps

bool triangle(t d) {
    return like_first(d) && below(d, 0, GGML_TRI_TYPE_LOWER + 1) && f32({ d }) && contiguous({ d->src[0] }) &&
           d->ne[0] == d->ne[1];
}

bool fill(t d) {
    return like_first(d) && floats(d);
}

bool flash_attention(t d) {
    t q = d->src[0], k = d->src[1], v = d->src[2], mask = d->src[3], sinks = d->src[4];
    if (mask && (mask->type != GGML_TYPE_F16 || !ggml_is_contiguous(mask) || mask->ne[0] < k->ne[1] ||
                 mask->ne[1] < q->ne[1] || !divides(mask->ne[2], q->ne[2]) || !divides(mask->ne[3], q->ne[3]))) {
        return false;
    }
    if (sinks && (!f32({ sinks }) || sinks->ne[0] != q->ne[2])) {
        return false;
    }
    return f32({ q, d }) && k->ne[0] == q->ne[0] && divides(k->ne[2], q->ne[2]) && divides(k->ne[3], q->ne[3]) &&
           divides(v->ne[2], q->ne[2]) && divides(v->ne[3], q->ne[3]) && k->ne[1] == v->ne[1] &&
           k->nb[0] == ggml_type_size(k->type) && v->nb[0] == ggml_type_size(v->type) && q->nb[0] == sizeof(float) &&
           is(d, { v->ne[0], q->ne[2], q->ne[1], q->ne[3] });
}

bool ssm_conv(t d) {
    t          a = d->src[0], c = d->src[1];
    const wide tokens = wide(a->ne[0]) - c->ne[0] + 1;
    return f32({ a, c, d }) && a->ne[3] == 1 && c->ne[2] == 1 && c->ne[3] == 1 && a->ne[1] == c->ne[1] && tokens >= 0 &&
           is(d, { c->ne[1], tokens, a->ne[2] });
}

bool ssm_scan(t d) {
    t s = d->src[0], x = d->src[1], dt = d->src[2], a = d->src[3], b = d->src[4], c = d->src[5], ids = d->src[6];
    const int32_t k       = parameter(d, 0);
    const wide    written = product(x) + wide(k) * s->ne[0] * s->ne[1] * s->ne[2] * ids->ne[0];
    return k >= 1 && f32({ d, s, x, dt, a, b, c }) && ids->type == GGML_TYPE_I32 && contiguous({ d, s, dt, a }) &&
           ggml_is_contiguous_rows(x) && ggml_are_same_shape(b, c) && is(dt, { x->ne[1], x->ne[2], x->ne[3] }) &&
           s->ne[1] == x->ne[0] && s->ne[2] == x->ne[1] && b->ne[0] == s->ne[0] && b->ne[2] == x->ne[2] &&
           b->ne[3] == x->ne[3] && divides(b->ne[1], x->ne[1]) && is(ids, { x->ne[3] }) && a->ne[1] == x->ne[1] &&
           a->ne[2] == 1 && a->ne[3] == 1 && (a->ne[0] == 1 || (a->ne[0] == s->ne[0] && k == 1)) && is(d, { written });
}

// RWKV and gated linear attention: heads of equal size, a state of S x S for each head and sequence.
bool recurrent(t d, t k, std::initializer_list<t> alike, t first, t state) {
    const int64_t size = k->ne[0], heads = k->ne[1], tokens = k->ne[2], sequences = state->ne[1];
    for (t x : alike) {
        if (!is(x, { size, heads, tokens }) || !f32({ x }) || !contiguous({ x })) {
            return false;
        }
    }
    if (first && (product(first) != wide(size) * heads || !f32({ first }) || !contiguous({ first }))) {
        return false;
    }
    return f32({ d, state }) && contiguous({ d, state }) && divides(sequences, tokens) &&
           product(state) == wide(size) * size * heads * sequences &&
           is(d, { wide(size) * heads, wide(tokens) + wide(size) * sequences });
}

bool wkv6(t d) {
    return recurrent(d, d->src[0], { d->src[0], d->src[1], d->src[2], d->src[4] }, d->src[3], d->src[5]);
}

bool wkv7(t d) {
    return recurrent(d, d->src[2], { d->src[0], d->src[1], d->src[2], d->src[3], d->src[4], d->src[5] }, nullptr,
                     d->src[6]);
}

bool gated_linear_attention(t d) {
    return recurrent(d, d->src[0], { d->src[0], d->src[1], d->src[2], d->src[3] }, nullptr, d->src[4]);
}

bool gated_delta_net(t d) {
    t             q = d->src[0], k = d->src[1], v = d->src[2], g = d->src[3], beta = d->src[4], state = d->src[5];
    const int64_t size = v->ne[0], heads = v->ne[1], tokens = v->ne[2], sequences = v->ne[3];
    const int32_t slots = parameter(d, 0);
    return slots >= 1 && f32({ d, q, k, v, g, beta, state }) && contiguous({ d, g, beta, state }) &&
           ggml_is_contiguous_rows(q) && ggml_is_contiguous_rows(k) && ggml_is_contiguous_rows(v) && q->ne[0] == size &&
           k->ne[0] == size && divides(q->ne[1], heads) && divides(k->ne[1], heads) && q->ne[2] == tokens &&
           k->ne[2] == tokens && divides(q->ne[3], sequences) && divides(k->ne[3], sequences) &&
           (g->ne[0] == 1 || g->ne[0] == size) && is(g, { g->ne[0], heads, tokens, sequences }) &&
           is(beta, { 1, heads, tokens, sequences }) && is(state, { size, size, heads, sequences }) &&
           is(d, { wide(size) * heads, wide(tokens) * sequences + wide(slots) * size * sequences });
}

bool solve_tri(t d) {
    t a = d->src[0], b = d->src[1];
    return f32({ a, b, d }) && contiguous({ a, b }) && a->ne[0] == a->ne[1] && a->ne[1] == b->ne[1] &&
           a->ne[2] == b->ne[2] && a->ne[3] == b->ne[3] && ggml_are_same_shape(d, b);
}

bool lightning_indexer(t d) {
    t q = d->src[0], k = d->src[1], w = d->src[2], mask = d->src[3];
    return f32({ d, q, w }) && mask->type == GGML_TYPE_F16 && q->ne[0] == k->ne[0] && k->ne[1] == 1 &&
           q->ne[3] == k->ne[3] && is(w, { q->ne[1], q->ne[2], 1, q->ne[3] }) && mask->ne[0] == k->ne[2] &&
           mask->ne[1] == q->ne[2] && mask->ne[2] == 1 && divides(mask->ne[3], w->ne[3]) &&
           is(d, { k->ne[2], q->ne[2], 1, q->ne[3] });
}

bool hc_comb(t d) {
    t mixes = d->src[0], scale = d->src[1], base = d->src[2];
    return f32({ d, mixes, scale, base }) && is(mixes, { 24, mixes->ne[1] }) && scale->ne[0] >= 3 &&
           is(scale, { scale->ne[0] }) && is(base, { 24 }) && parameter(d, 1) > 0 && is(d, { 4, 4, mixes->ne[1] });
}

bool hc_pre(t d) {
    t x = d->src[0], w = d->src[1];
    return f32({ d, x, w }) && x->ne[1] > 0 && x->ne[3] == 1 && is(d, { x->ne[0], x->ne[2] }) &&
           (parameter(d, 1) ? is(w, { x->ne[0], x->ne[1], x->ne[2] }) : is(w, { x->ne[1], x->ne[2] }));
}

bool hc_post(t d) {
    t             x = d->src[0], residual = d->src[1], post = d->src[2], comb = d->src[3];
    const int64_t hc = residual->ne[1];
    return f32({ d, x, residual, post }) && hc > 0 && is(x, { x->ne[0], x->ne[1] }) &&
           is(residual, { x->ne[0], hc, x->ne[1] }) && is(post, { hc, x->ne[1] }) &&
           (!comb || (f32({ comb }) && is(comb, { hc, hc, x->ne[1] }))) && is(d, { x->ne[0], hc, x->ne[1] });
}

struct rule {
    int n_sources; // that must be there
    bool (*fits)(t node);
};

// Operators of inference. Without a rule, and so refused: training, and those that call a function whose address comes
// in the message (MAP_CUSTOM, CUSTOM).
rule rule_of(ggml_op op) {
    switch (op) {
        case GGML_OP_DUP:
        case GGML_OP_CONT: return { 1, copy };
        case GGML_OP_CPY: return { 2, copy };
        case GGML_OP_ADD:
        case GGML_OP_SUB:
        case GGML_OP_MUL:
        case GGML_OP_DIV: return { 2, binary };
        case GGML_OP_ADD_ID: return { 3, add_id };
        case GGML_OP_ACC:
        case GGML_OP_SET: return { 2, set };
        case GGML_OP_SQR:
        case GGML_OP_SQRT:
        case GGML_OP_LOG:
        case GGML_OP_SIN:
        case GGML_OP_COS:
        case GGML_OP_CUMSUM:
        case GGML_OP_NORM:
        case GGML_OP_RMS_NORM:
        case GGML_OP_L2_NORM:
        case GGML_OP_SCALE:
        case GGML_OP_CLAMP:
        case GGML_OP_LEAKY_RELU: return { 1, like_first };
        case GGML_OP_GROUP_NORM: return { 1, group_norm };
        case GGML_OP_UNARY: return { 1, unary };
        case GGML_OP_GLU: return { 1, glu };
        case GGML_OP_SUM: return { 1, sum };
        case GGML_OP_SUM_ROWS:
        case GGML_OP_MEAN: return { 1, sum_rows };
        case GGML_OP_ARGMAX: return { 1, argmax };
        case GGML_OP_ARGSORT: return { 1, argsort };
        case GGML_OP_TOP_K: return { 1, top_k };
        case GGML_OP_REPEAT: return { 1, repeat };
        case GGML_OP_CONCAT: return { 2, concat };
        case GGML_OP_MUL_MAT: return { 2, mul_mat };
        case GGML_OP_MUL_MAT_ID: return { 3, mul_mat_id };
        case GGML_OP_OUT_PROD: return { 2, out_prod };
        case GGML_OP_GET_ROWS: return { 2, get_rows };
        case GGML_OP_SET_ROWS: return { 3, set_rows };
        case GGML_OP_DIAG: return { 1, diag };
        case GGML_OP_DIAG_MASK_INF:
        case GGML_OP_DIAG_MASK_ZERO: return { 1, diag_mask };
        case GGML_OP_SOFT_MAX: return { 1, soft_max };
        case GGML_OP_ROPE:
        case GGML_OP_ROPE_BACK: return { 2, rope };
        case GGML_OP_IM2COL: return { 2, im2col };
        case GGML_OP_CONV_2D: return { 2, conv_2d };
        case GGML_OP_CONV_2D_DW: return { 2, conv_2d_dw };
        case GGML_OP_CONV_TRANSPOSE_1D: return { 2, conv_transpose_1d };
        case GGML_OP_CONV_TRANSPOSE_2D: return { 2, conv_transpose_2d };
        case GGML_OP_COL2IM_1D: return { 1, col2im_1d };
        case GGML_OP_POOL_1D: return { 1, pool_1d };
        case GGML_OP_POOL_2D: return { 1, pool_2d };
        case GGML_OP_UPSCALE: return { 1, upscale };
        case GGML_OP_PAD: return { 1, pad };
        case GGML_OP_PAD_REFLECT_1D: return { 1, pad_reflect_1d };
        case GGML_OP_ROLL: return { 1, roll };
        case GGML_OP_TIMESTEP_EMBEDDING: return { 1, timestep_embedding };
        case GGML_OP_ARANGE: return { 0, arange };
        case GGML_OP_TRI: return { 1, triangle };
        case GGML_OP_FILL: return { 1, fill };
        case GGML_OP_FLASH_ATTN_EXT: return { 3, flash_attention };
        case GGML_OP_SSM_CONV: return { 2, ssm_conv };
        case GGML_OP_SSM_SCAN: return { 7, ssm_scan };
        case GGML_OP_RWKV_WKV6: return { 6, wkv6 };
        case GGML_OP_RWKV_WKV7: return { 7, wkv7 };
        case GGML_OP_GATED_LINEAR_ATTN: return { 5, gated_linear_attention };
        case GGML_OP_GATED_DELTA_NET: return { 6, gated_delta_net };
        case GGML_OP_SOLVE_TRI: return { 2, solve_tri };
        case GGML_OP_LIGHTNING_INDEXER: return { 4, lightning_indexer };
        case GGML_OP_DSV4_HC_COMB: return { 3, hc_comb };
        case GGML_OP_DSV4_HC_PRE: return { 2, hc_pre };
        case GGML_OP_DSV4_HC_POST: return { 3, hc_post };
        default: return { 0, nullptr };
    }
}

} // namespace

bool has_sources(const ggml_tensor * node) {
    const rule known = rule_of(node->op);
    for (int i = 0; i < known.n_sources; ++i) {
        if (!node->src[i]) {
            return false;
        }
    }
    return known.fits != nullptr;
}

bool fits_sources(const ggml_tensor * node) {
    return rule_of(node->op).fits(node);
}

} // namespace oa_rpc
