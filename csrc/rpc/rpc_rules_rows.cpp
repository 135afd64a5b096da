// Rules of operators on elements, rows and matrices.
#include "rpc_rules.h"

namespace oa_rpc {

bool binary(tensor d) {
    return ggml_are_same_shape(d, d->src[0]) && repeats(d->src[1], d);
}

bool add_id(tensor d) {
    tensor a = d->src[0], b = d->src[1], ids = d->src[2];
    return like_first(d) && f32({ a, b }) && a->ne[0] == b->ne[0] && a->ne[1] == ids->ne[0] && a->ne[2] == ids->ne[1] &&
           a->ne[3] == 1 && ids->type == GGML_TYPE_I32;
}

bool unary(tensor d) {
    return like_first(d) && below(d, 0, GGML_UNARY_OP_COUNT);
}

bool row_by_row(tensor d) {
    return like_first(d) && rows_follow(d) && rows_follow(d->src[0]);
}

bool glu(tensor d) {
    tensor a = d->src[0], b = d->src[1];
    if (!below(d, 0, GGML_GLU_OP_COUNT) || d->type != a->type || !rows_follow(d) || !rows_follow(a) ||
        (b && !rows_follow(b))) {
        return false;
    }
    if (b) {
        return ggml_are_same_shape(a, b) && a->type == b->type && ggml_are_same_shape(d, a);
    }
    return is(d, { a->ne[0] / 2, a->ne[1], a->ne[2], a->ne[3] });
}

bool group_norm(tensor d) {
    return like_first(d) && parameter(d, 0) > 0;
}

bool sum(tensor d) {
    return product(d) == 1 && d->type == d->src[0]->type;
}

bool sum_rows(tensor d) {
    tensor a = d->src[0];
    return is(d, { 1, a->ne[1], a->ne[2], a->ne[3] }) && d->type == a->type && a->nb[0] == ggml_type_size(a->type);
}

bool argmax(tensor d) {
    tensor a = d->src[0];
    return is(d, { a->ne[1] }) && a->ne[2] == 1 && a->ne[3] == 1 && d->type == GGML_TYPE_I32 && f32({ a });
}

bool argsort(tensor d) {
    return ggml_are_same_shape(d, d->src[0]) && d->type == GGML_TYPE_I32 && f32({ d->src[0] }) &&
           below(d, 0, GGML_SORT_ORDER_DESC + 1);
}

bool top_k(tensor d) {
    tensor a = d->src[0];
    return d->ne[0] <= a->ne[0] && is(d, { d->ne[0], a->ne[1], a->ne[2], a->ne[3] }) && d->type == GGML_TYPE_I32 &&
           f32({ a });
}

bool repeat(tensor d) {
    return repeats(d->src[0], d) && d->type == d->src[0]->type;
}

bool concat(tensor d) {
    tensor    a = d->src[0], b = d->src[1];
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

bool mul_mat(tensor d) {
    tensor a = d->src[0], b = d->src[1];
    return multiplies(a) && a->ne[0] == b->ne[0] && divides(a->ne[2], b->ne[2]) && divides(a->ne[3], b->ne[3]) &&
           f32({ d }) && !ggml_is_transposed(a) && is(d, { a->ne[1], b->ne[1], b->ne[2], b->ne[3] });
}

bool mul_mat_id(tensor d) {
    tensor as = d->src[0], b = d->src[1], ids = d->src[2];
    return multiplies(as) && !ggml_is_transposed(as) && ids->type == GGML_TYPE_I32 && as->ne[3] == 1 && b->ne[3] == 1 &&
           ids->ne[2] == 1 && ids->ne[3] == 1 && ids->ne[1] == b->ne[2] && as->ne[0] == b->ne[0] &&
           divides(b->ne[1], ids->ne[0]) && f32({ d }) && is(d, { as->ne[1], ids->ne[0], b->ne[2], 1 });
}

bool out_prod(tensor d) {
    tensor a = d->src[0], b = d->src[1];
    return a->ne[1] == b->ne[1] && divides(a->ne[2], b->ne[2]) && divides(a->ne[3], b->ne[3]) && f32({ b, d }) &&
           is(d, { a->ne[0], b->ne[0], b->ne[2], b->ne[3] });
}

// ggml_set and ggml_acc: the second source lands in the first, seen through strides and an offset.
bool set(tensor d) {
    tensor a = d->src[0], b = d->src[1];
    wide   end = wide(ggml_type_size(d->type)) * b->ne[0] + parameter(d, 3);
    for (int i = 0; i < 4; ++i) {
        end += i < 3 ? wide(parameter(d, i)) * (b->ne[i + 1] - 1) : 0;
        if (parameter(d, i) < 0 || parameter(d, i) % ggml_type_size(d->type) != 0) {
            return false;
        }
    }
    return like_first(d) && b->type == a->type && contiguous({ a, d }) && b->nb[0] == ggml_type_size(b->type) &&
           !ggml_is_empty(b) && end <= wide(ggml_nbytes(d));
}

bool copy(tensor d) {
    return product(d) == product(d->src[0]);
}

bool get_rows(tensor d) {
    tensor a = d->src[0], b = d->src[1];
    return a->ne[2] == b->ne[1] && a->ne[3] == b->ne[2] && b->ne[3] == 1 && b->type == GGML_TYPE_I32 &&
           d->type == (a->type == GGML_TYPE_I32 ? GGML_TYPE_I32 : GGML_TYPE_F32) &&
           is(d, { a->ne[0], b->ne[0], b->ne[1], b->ne[2] });
}

bool set_rows(tensor d) {
    tensor b = d->src[0], c = d->src[1], a = d->src[2];
    return a->ne[0] == b->ne[0] && a->ne[2] == b->ne[2] && a->ne[3] == b->ne[3] && b->ne[1] == c->ne[0] &&
           divides(c->ne[1], b->ne[2]) && divides(c->ne[2], b->ne[3]) && c->ne[3] == 1 && floats(b) &&
           (c->type == GGML_TYPE_I64 || c->type == GGML_TYPE_I32) && ggml_is_contiguous_rows(b) &&
           ggml_is_contiguous_rows(d) && ggml_are_same_shape(d, a) && d->type == a->type;
}

bool diag(tensor d) {
    tensor a = d->src[0];
    return a->ne[1] == 1 && d->type == a->type && is(d, { a->ne[0], a->ne[0], a->ne[2], a->ne[3] });
}

bool diag_mask(tensor d) {
    return row_by_row(d) && parameter(d, 0) >= 0;
}

// The kernel compares the number of steps.
bool arange(tensor d) {
    return f32({ d }) && contiguous({ d });
}

bool triangle(tensor d) {
    return like_first(d) && below(d, 0, GGML_TRI_TYPE_LOWER + 1) && f32({ d }) && contiguous({ d->src[0] }) &&
           d->ne[0] == d->ne[1];
}

bool fill(tensor d) {
    return like_first(d) && floats(d);
}

bool solve_tri(tensor d) {
    tensor a = d->src[0], b = d->src[1];
    return f32({ a, b, d }) && contiguous({ a, b }) && a->ne[0] == a->ne[1] && a->ne[1] == b->ne[1] &&
           a->ne[2] == b->ne[2] && a->ne[3] == b->ne[3] && ggml_are_same_shape(d, b);
}

} // namespace oa_rpc
