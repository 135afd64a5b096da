// Rules of attention and of recurrent layers.
#include "rpc_rules.h"

namespace oa_rpc {

bool soft_max(tensor d) {
    tensor a = d->src[0], mask = d->src[1], sinks = d->src[2];
    if (mask && (!floats(mask) || !ggml_is_contiguous(mask) || mask->ne[0] != a->ne[0] || mask->ne[1] < a->ne[1] ||
                 !divides(mask->ne[2], a->ne[2]) || !divides(mask->ne[3], a->ne[3]))) {
        return false;
    }
    if (sinks && (!f32({ sinks }) || sinks->ne[0] != a->ne[2])) {
        return false;
    }
    return like_first(d) && f32({ a }) && contiguous({ a, d });
}

bool rope(tensor d) {
    tensor        a = d->src[0], b = d->src[1], c = d->src[2];
    const int32_t n_dims = parameter(d, 1), mode = parameter(d, 2), offset = parameter(d, 15);
    const wide    positions = wide(a->ne[2]) * (mode & GGML_ROPE_TYPE_MROPE ? 4 : 1);
    const bool    vision    = mode == GGML_ROPE_TYPE_VISION;
    return like_first(d) && is(b, { positions }) && b->type == GGML_TYPE_I32 && n_dims > 0 && offset >= 0 &&
           wide(n_dims) * (vision ? 2 : 1) + offset <= a->ne[0] && (!c || (f32({ c }) && c->ne[0] >= n_dims / 2));
}

bool flash_attention(tensor d) {
    tensor q = d->src[0], k = d->src[1], v = d->src[2], mask = d->src[3], sinks = d->src[4];
    if (mask && (mask->type != GGML_TYPE_F16 || !ggml_is_contiguous(mask) || mask->ne[0] < k->ne[1] ||
                 mask->ne[1] < q->ne[1] || !divides(mask->ne[2], q->ne[2]) || !divides(mask->ne[3], q->ne[3]))) {
        return false;
    }
    if (sinks && (!f32({ sinks }) || sinks->ne[0] != q->ne[2])) {
        return false;
    }
    return multiplies(k) && f32({ q, d }) && k->ne[0] == q->ne[0] && divides(k->ne[2], q->ne[2]) &&
           divides(k->ne[3], q->ne[3]) && divides(v->ne[2], q->ne[2]) && divides(v->ne[3], q->ne[3]) &&
           k->ne[1] == v->ne[1] && k->nb[0] == ggml_type_size(k->type) && v->nb[0] == ggml_type_size(v->type) &&
           q->nb[0] == sizeof(float) && is(d, { v->ne[0], q->ne[2], q->ne[1], q->ne[3] });
}

bool ssm_conv(tensor d) {
    tensor     a = d->src[0], c = d->src[1];
    const wide tokens = wide(a->ne[0]) - c->ne[0] + 1;
    return f32({ a, c, d }) && a->ne[3] == 1 && c->ne[2] == 1 && c->ne[3] == 1 && a->ne[1] == c->ne[1] && tokens >= 0 &&
           is(d, { c->ne[1], tokens, a->ne[2] });
}

bool ssm_scan(tensor d) {
    tensor s = d->src[0], x = d->src[1], dt = d->src[2], a = d->src[3], b = d->src[4], c = d->src[5], ids = d->src[6];
    const int32_t k       = parameter(d, 0);
    const wide    written = product(x) + wide(k) * s->ne[0] * s->ne[1] * s->ne[2] * ids->ne[0];
    return k >= 1 && f32({ d, s, x, dt, a, b, c }) && ids->type == GGML_TYPE_I32 && contiguous({ d, s, dt, a }) &&
           ggml_is_contiguous_rows(x) && ggml_are_same_shape(b, c) && is(dt, { x->ne[1], x->ne[2], x->ne[3] }) &&
           s->ne[1] == x->ne[0] && s->ne[2] == x->ne[1] && b->ne[0] == s->ne[0] && b->ne[2] == x->ne[2] &&
           b->ne[3] == x->ne[3] && divides(b->ne[1], x->ne[1]) && is(ids, { x->ne[3] }) && a->ne[1] == x->ne[1] &&
           a->ne[2] == 1 && a->ne[3] == 1 && (a->ne[0] == 1 || (a->ne[0] == s->ne[0] && k == 1)) && is(d, { written });
}

namespace {

// RWKV and gated linear attention: heads of equal size, a state of S x S for each head and sequence.
bool recurrent(tensor d, tensor k, std::initializer_list<tensor> alike, tensor first, tensor state) {
    const int64_t size = k->ne[0], heads = k->ne[1], tokens = k->ne[2], sequences = state->ne[1];
    for (tensor x : alike) {
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

} // namespace

bool wkv6(tensor d) {
    return recurrent(d, d->src[0], { d->src[0], d->src[1], d->src[2], d->src[4] }, d->src[3], d->src[5]);
}

bool wkv7(tensor d) {
    return recurrent(d, d->src[2], { d->src[0], d->src[1], d->src[2], d->src[3], d->src[4], d->src[5] }, nullptr,
                     d->src[6]);
}

bool gated_linear_attention(tensor d) {
    return recurrent(d, d->src[0], { d->src[0], d->src[1], d->src[2], d->src[3] }, nullptr, d->src[4]);
}

bool gated_delta_net(tensor d) {
    tensor        q = d->src[0], k = d->src[1], v = d->src[2], g = d->src[3], beta = d->src[4], state = d->src[5];
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

bool lightning_indexer(tensor d) {
    tensor q = d->src[0], k = d->src[1], w = d->src[2], mask = d->src[3];
    return f32({ d, q, w }) && mask->type == GGML_TYPE_F16 && q->ne[0] == k->ne[0] && k->ne[1] == 1 &&
           q->ne[3] == k->ne[3] && is(w, { q->ne[1], q->ne[2], 1, q->ne[3] }) && mask->ne[0] == k->ne[2] &&
           mask->ne[1] == q->ne[2] && mask->ne[2] == 1 && divides(mask->ne[3], w->ne[3]) &&
           is(d, { k->ne[2], q->ne[2], 1, q->ne[3] });
}

bool hc_comb(tensor d) {
    tensor mixes = d->src[0], scale = d->src[1], base = d->src[2];
    return f32({ d, mixes, scale, base }) && is(mixes, { 24, mixes->ne[1] }) && scale->ne[0] >= 3 &&
           is(scale, { scale->ne[0] }) && is(base, { 24 }) && parameter(d, 1) > 0 && is(d, { 4, 4, mixes->ne[1] });
}

bool hc_pre(tensor d) {
    tensor x = d->src[0], w = d->src[1];
    return f32({ d, x, w }) && x->ne[1] > 0 && x->ne[3] == 1 && is(d, { x->ne[0], x->ne[2] }) &&
           (parameter(d, 1) ? is(w, { x->ne[0], x->ne[1], x->ne[2] }) : is(w, { x->ne[1], x->ne[2] }));
}

bool hc_post(tensor d) {
    tensor        x = d->src[0], residual = d->src[1], post = d->src[2], comb = d->src[3];
    const int64_t hc = residual->ne[1];
    return f32({ d, x, residual, post }) && hc > 0 && is(x, { x->ne[0], x->ne[1] }) &&
           is(residual, { x->ne[0], hc, x->ne[1] }) && is(post, { hc, x->ne[1] }) &&
           (!comb || (f32({ comb }) && is(comb, { hc, hc, x->ne[1] }))) && is(d, { x->ne[0], hc, x->ne[1] });
}

} // namespace oa_rpc
