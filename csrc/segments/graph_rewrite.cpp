#include "graph_rewrite.h"

#include "tensor_flags.h"

#include <cstring>

namespace {

constexpr int64_t upload_from = 32; // tokens, as upstream's op_offload

bool computes(const ggml_tensor * node) {
    switch (node->op) {
        case GGML_OP_NONE:
        case GGML_OP_VIEW:
        case GGML_OP_RESHAPE:
        case GGML_OP_PERMUTE:
        case GGML_OP_TRANSPOSE: return false;
        default: return true;
    }
}

} // namespace

bool oa_computed_in_parts(const ggml_tensor * op, const ggml_tensor * weight) {
    const int64_t tokens = op->op == GGML_OP_MUL_MAT ? op->ne[1] : op->ne[2];
    if (weight->flags & OA_TENSOR_FLAG_STREAM) {
        return tokens < OA_STREAM_FROM(weight);
    }
    return (weight->flags & OA_TENSOR_FLAG_HOST) || tokens < upload_from;
}

oa_graph_rewrite::oa_graph_rewrite(ggml_context * ctx, ggml_cgraph * graph) : ctx_(ctx), graph_(graph) {
    for (int i = 0; i < ggml_graph_n_nodes(graph); ++i) {
        nodes_.push_back(ggml_graph_node(graph, i));
    }
}

ggml_tensor * oa_graph_rewrite::like(const ggml_tensor * t, int64_t count, oa_side side) {
    ggml_tensor * made = ggml_new_tensor_4d(ctx_, t->type, count, t->ne[1], t->ne[2], t->ne[3]);
    made->op           = t->op;
    made->flags        = t->flags & ~(GGML_TENSOR_FLAG_OUTPUT | GGML_TENSOR_FLAG_INPUT);
    std::memcpy(made->op_params, t->op_params, sizeof(made->op_params));
    ggml_format_name(made, "%s (%s)", t->name, side == OA_HOST ? "host" : "device");
    return made;
}

void oa_graph_rewrite::replace(ggml_tensor * op, ggml_op joins, ggml_tensor * device, ggml_tensor * host) {
    const int64_t width = op->ne[0];
    op->op              = joins;
    std::memset(op->op_params, 0, sizeof(op->op_params));
    std::memset(op->src, 0, sizeof(op->src));
    op->src[0] = device;
    op->src[1] = host;
    op->flags |= OA_TENSOR_FLAG_APART;
    GGML_ASSERT(joins == GGML_OP_ADD ? device->ne[0] == width : device->ne[0] + host->ne[0] == width);
    replaced_.insert(op);
}

void oa_graph_rewrite::rebuild() {
    keep_what_is_read();
    ggml_graph_clear(graph_);
    for (ggml_tensor * node : nodes_) {
        if (idle_.count(node)) {
            continue;
        }
        if (replaced_.count(node)) {
            for (const oa_side side : { OA_DEVICE, OA_HOST }) {
                const int first = ggml_graph_n_nodes(graph_);
                ggml_build_forward_expand(graph_, node->src[side]);
                mark_first(first, side);
            }
        }
        ggml_build_forward_expand(graph_, node);
    }
}

// The first operator of a part starts a split; the device's part leads.
void oa_graph_rewrite::mark_first(int first, oa_side side) {
    for (int i = first; i < ggml_graph_n_nodes(graph_); ++i) {
        ggml_tensor * node = ggml_graph_node(graph_, i);
        if (computes(node)) {
            node->flags |= OA_TENSOR_FLAG_APART | (side == OA_DEVICE ? OA_TENSOR_FLAG_LEADS : OA_TENSOR_FLAG_FOLLOWS);
            return;
        }
    }
}

void oa_graph_rewrite::keep_what_is_read() {
    for (auto it = nodes_.rbegin(); it != nodes_.rend(); ++it) {
        if (idle_.count(*it) && ((*it)->flags & GGML_TENSOR_FLAG_OUTPUT)) {
            idle_.erase(*it);
        }
        if (idle_.count(*it) == 0) {
            for (ggml_tensor * src : (*it)->src) {
                idle_.erase(src);
            }
        }
    }
}
