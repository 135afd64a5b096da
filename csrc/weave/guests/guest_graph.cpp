// The graph of a micro-batch with guests: their rows leave before the attention of the others, and come back after it.
// Of sequences that begin, K and V leave, and nothing comes back: their rows attend to each other here.
#include "attend_rows.h"
#include "guest_hooks.h"
#include "guest_op.h"
#include "own_attention.h"

using namespace oa::weave;

namespace {

// Inputs of the local rows; a graph is used again while the numbers of rows stay.
class GuestInput : public llm_graph_input_attn_kv {
  public:
    using llm_graph_input_attn_kv::llm_graph_input_attn_kv;

    void set_input(const llama_ubatch * ubatch) override {
        if (mask_of_new && mask_of_new->buffer) {
            set_mask_of_new(*ubatch);
        }
        if (context().n_local() > 0) {
            return llm_graph_input_attn_kv::set_input(&context().local());
        }
        if (self_k_rot && self_k_rot->buffer) {
            mctx->set_input_k_rot(self_k_rot);
        }
        if (self_v_rot && self_v_rot->buffer) {
            mctx->set_input_v_rot(self_v_rot);
        }
    }

    bool can_reuse(const llm_graph_params & params) override {
        const auto * now = dynamic_cast<const GuestContext *>(params.mctx);
        if (!now || now->n_local() != n_local || now->n_new() != n_new || now->n_away() != n_away ||
            now->cache()->sender_number() != sender) {
            return false;
        }
        mctx = now;
        if (n_local == 0) {
            return true;
        }
        llm_graph_params of_locals = params;
        of_locals.ubatch           = now->local();
        return llm_graph_input_attn_kv::can_reuse(of_locals);
    }

    const GuestContext & context() const { return *static_cast<const GuestContext *>(mctx); }

    uint32_t n_local = 0, n_new = 0, n_away = 0;
    uint32_t sender = 0; // GuestCache::sender_number()

    ggml_tensor * mask_of_new = nullptr; // F16 [n_new, n_new]

  private:
    // A row sees those of its own sequence up to itself, which stand right before it.
    void set_mask_of_new(const llama_ubatch & ubatch) {
        std::vector<ggml_fp16_t> mask(size_t(n_new) * n_new, ggml_fp32_to_fp16(-INFINITY));
        for (uint32_t i = 0; i < n_new; ++i) {
            const auto position = uint32_t(ubatch.pos[n_local + i]);
            for (uint32_t back = 0; back <= position; ++back) {
                mask[size_t(i) * n_new + i - back] = ggml_fp32_to_fp16(hparams.use_alibi ? -float(back) : 0.0f);
            }
        }
        ggml_backend_tensor_set(mask_of_new, mask.data(), 0, ggml_nbytes(mask_of_new));
    }
};

ggml_tensor * rows(ggml_context * ctx, ggml_tensor * all, int64_t first, int64_t n) {
    return ggml_view_3d(ctx, all, all->ne[0], all->ne[1], n, all->nb[1], all->nb[2], size_t(first) * all->nb[2]);
}

// Rows of floats whose heads follow each other; each on so many bytes.
ggml_tensor * plain(ggml_context * ctx, ggml_tensor * x, size_t alignment) {
    if (x->type != GGML_TYPE_F32) {
        return ggml_cast(ctx, x, GGML_TYPE_F32);
    }
    const bool is_plain   = x->nb[0] == sizeof(float) && x->nb[1] == size_t(x->ne[0]) * sizeof(float);
    const bool is_aligned = x->nb[2] % alignment == 0 && x->view_offs % alignment == 0;
    return is_plain && is_aligned ? x : ggml_cont(ctx, x);
}

// The device of the cache computes an operator, with the sender that is there.
void put_on_device(const llm_graph_context & graph, ggml_tensor * node, const GuestOp & op, ggml_backend_dev_t device) {
    set_guest_op(node, op);
    for (int i = 0; i < ggml_backend_sched_get_n_backends(graph.sched); ++i) {
        ggml_backend_t backend = ggml_backend_sched_get_backend(graph.sched, i);
        if (ggml_backend_get_device(backend) == device) {
            ggml_backend_sched_set_tensor_backend(graph.sched, node, backend);
        }
    }
}

const float * floats(const ggml_tensor * x) {
    return static_cast<const float *>(x->data);
}

size_t stride(const ggml_tensor * x) {
    return x->nb[2] / sizeof(float);
}

void send_op(ggml_tensor * dst, int ith, int nth, void * userdata) {
    if (ith != 0) {
        return;
    }
    const auto &       layer = *static_cast<const GuestLayer *>(userdata);
    const ggml_tensor *q = dst->src[0], *k = dst->src[1], *v = dst->src[2], *sinks = dst->src[3];
    Attention          wanted = {};
    wanted.task               = layer.task;
    wanted.task.n_rows        = uint32_t(q->ne[2]);
    wanted.sinks              = sinks ? floats(sinks) : nullptr;
    wanted.q                  = floats(q);
    wanted.k                  = floats(k);
    wanted.v                  = floats(v);
    wanted.q_stride           = stride(q);
    wanted.k_stride           = stride(k);
    wanted.v_stride           = stride(v);
    wanted.out                = static_cast<float *>(dst->data);
    layer.cache->send(wanted, uint32_t(nth));
}

// src: K and V; dst has nothing to say.
void append_op(ggml_tensor * dst, int ith, int nth, void * userdata) {
    GGML_UNUSED(nth);
    if (ith != 0) {
        return;
    }
    const auto &       layer = *static_cast<const GuestLayer *>(userdata);
    const ggml_tensor *k = dst->src[0], *v = dst->src[1];
    Attention          wanted = {};
    wanted.task               = layer.task;
    wanted.k                  = floats(k);
    wanted.v                  = floats(v);
    wanted.k_stride           = stride(k);
    wanted.v_stride           = stride(v);
    layer.cache->append(wanted);
}

// dst: the rows computed here (src[1], if any), then the others (src[0]).
void receive_op(ggml_tensor * dst, int ith, int nth, void * userdata) {
    GGML_UNUSED(nth);
    if (ith != 0) {
        return;
    }
    static_cast<const GuestLayer *>(userdata)->cache->receive();
    const ggml_tensor *away = dst->src[0], *here = dst->src[1];
    char *             to = static_cast<char *>(dst->data);
    if (here) {
        memcpy(to, here->data, ggml_nbytes(here));
        to += ggml_nbytes(here);
    }
    memcpy(to, away->data, ggml_nbytes(away));
}

// As the cache keeps K or V.
ggml_tensor * as_kept(ggml_context * ctx, ggml_tensor * x, ggml_type type) {
    return x->type == type ? x : ggml_cast(ctx, x, type);
}

} // namespace

std::unique_ptr<llm_graph_input_attn_kv> oa_weave_input(const llm_graph_context & graph) {
    const auto * context = dynamic_cast<const GuestContext *>(graph.mctx);
    if (!context) {
        return nullptr;
    }
    auto inp        = std::make_unique<GuestInput>(graph.hparams, graph.cparams, context);
    inp->n_local    = context->n_local();
    inp->n_new      = context->n_new();
    inp->n_away     = context->n_away();
    inp->sender     = context->cache()->sender_number();
    inp->self_k_rot = context->build_input_k_rot(graph.ctx0);
    inp->self_v_rot = context->build_input_v_rot(graph.ctx0);
    if (inp->n_local > 0) {
        inp->self_k_idxs  = context->build_input_k_idxs(graph.ctx0, context->local());
        inp->self_v_idxs  = context->build_input_v_idxs(graph.ctx0, context->local());
        inp->self_kq_mask = ggml_new_tensor_4d(graph.ctx0, GGML_TYPE_F16, context->get_n_kv(), inp->n_local, 1, 1);
        ggml_set_input(inp->self_kq_mask);
        ggml_set_name(inp->self_kq_mask, "attn_inp_kq_mask");
        inp->self_kq_mask_cnv = inp->self_kq_mask;
    }
    if (inp->n_new > 0) {
        inp->mask_of_new = ggml_new_tensor_2d(graph.ctx0, GGML_TYPE_F16, inp->n_new, inp->n_new);
        ggml_set_input(inp->mask_of_new);
        ggml_set_name(inp->mask_of_new, "guests_mask");
    }
    return inp;
}

ggml_tensor * oa_weave_attend(const llm_graph_context & graph, const llm_graph_input_attn_kv * inp, ggml_tensor * q,
                              ggml_tensor * k, ggml_tensor * v, ggml_tensor * sinks, float scale, int il) {
    const auto * of = dynamic_cast<const GuestInput *>(inp);
    if (!of) {
        return nullptr;
    }
    ggml_context * ctx     = graph.ctx0;
    const auto     n_local = int64_t(of->n_local), n_new = int64_t(of->n_new), n_away = int64_t(of->n_away);
    const auto     n_all = n_local + n_new + n_away, n_head = q->ne[1], d_v = v->ne[0];
    const size_t   alignment = of->sender != 0 ? 16 : 1;

    GuestCache & guests  = *of->context().cache();
    GuestLayer & layer   = guests.layer(il);
    layer.cache          = &guests;
    layer.task.layer     = uint32_t(il);
    layer.task.n_head    = uint32_t(n_head);
    layer.task.n_head_kv = uint32_t(k->ne[1]);
    layer.task.d_k       = uint32_t(k->ne[0]);
    layer.task.d_v       = uint32_t(d_v);
    layer.task.scale     = scale;
    layer.task.max_bias  = graph.hparams.f_max_alibi_bias;
    layer.task.softcap   = graph.hparams.attn_soft_cap ? graph.hparams.f_attn_logit_softcapping : 0.0f;

    layer.task.own = guests.own_attention(layer.task);
    if (n_new + n_away == 0 && !layer.task.own) {
        return nullptr;
    }
    const auto as_away = [&](ggml_tensor * node) { // computed as the rows that are away
        oa_attend_rows_set(node, int32_t(n_all));
        node->op_params[OA_ATTEND_PARAM] = layer.task.own ? OA_ATTEND_ALONE : 0;
    };
    ggml_tensor *away = nullptr, *local = nullptr, *of_new = nullptr;
    if (n_away > 0) {
        const int64_t first  = n_local + n_new;
        ggml_tensor * sent[] = { plain(ctx, rows(ctx, q, first, n_away), alignment),
                                 plain(ctx, rows(ctx, k, first, n_away), alignment),
                                 plain(ctx, rows(ctx, v, first, n_away), alignment), sinks };
        away = ggml_custom_4d(ctx, GGML_TYPE_F32, d_v * n_head, n_away, 1, 1, sent, sinks ? 4 : 3, send_op,
                              GGML_N_TASKS_MAX, &layer);
        graph.cb(away, "guests_sent", il);
        ggml_build_forward_expand(graph.gf, away);
    }
    ggml_tensor *k_new = nullptr, *v_new = nullptr;
    if (n_new > 0) {
        k_new                = plain(ctx, rows(ctx, k, n_local, n_new), alignment);
        v_new                = plain(ctx, rows(ctx, v, n_local, n_new), alignment);
        ggml_tensor * sent[] = { k_new, v_new };
        ggml_tensor * node   = ggml_custom_4d(ctx, GGML_TYPE_F32, 1, 1, 1, 1, sent, 2, append_op, 1, &layer);
        graph.cb(node, "guests_appended", il);
        ggml_build_forward_expand(graph.gf, node);
    }
    if (n_local > 0) {
        const auto * cache = inp->mctx;
        ggml_build_forward_expand(graph.gf, cache->cpy_k(ctx, rows(ctx, k, 0, n_local), inp->get_k_idxs(), il));
        ggml_build_forward_expand(graph.gf, cache->cpy_v(ctx, rows(ctx, v, 0, n_local), inp->get_v_idxs(), il));
        local = graph.build_attn_mha(rows(ctx, q, 0, n_local), cache->get_k(ctx, il), cache->get_v(ctx, il), nullptr,
                                     inp->get_kq_mask(), sinks, nullptr, 0, scale, il);
        as_away(local->src[0]);
    }
    if (n_new > 0) {
        of_new = graph.build_attn_mha(rows(ctx, q, n_local, n_new), as_kept(ctx, k_new, guests.type_k()),
                                      as_kept(ctx, v_new, guests.type_v()), nullptr, of->mask_of_new, sinks, nullptr, 0,
                                      scale, il);
        as_away(of_new->src[0]);
    }

    ggml_tensor * all = local && of_new ? ggml_concat(ctx, local, of_new, 1) : local ? local : of_new;
    if (away) {
        ggml_tensor * parts[] = { away, all };
        all = ggml_custom_4d(ctx, GGML_TYPE_F32, d_v * n_head, n_all, 1, 1, parts, all ? 2 : 1, receive_op, 1, &layer);
    }
    if (of->sender != 0) {
        const ggml_backend_dev_t device = guests.device();
        put_on_device(graph, away, { GuestOp::Kind::send, of->sender, &layer.task }, device);
        put_on_device(graph, all, { GuestOp::Kind::receive, of->sender, &layer.task }, device);
    }
    ggml_build_forward_expand(graph.gf, all);
    return all;
}
