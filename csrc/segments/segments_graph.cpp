// Rewrites a graph whose weights are divided (segments.h).
//
// An operator that is replaced becomes the sum or the concatenation itself, in place: whoever holds a pointer to it
// (outputs, callbacks) reads the same values as before. What nobody reads any more is left out of the graph.
#include "segments.h"
#include "tensor_flags.h"

#include <cstring>
#include <set>
#include <vector>

namespace {

constexpr int64_t upload_from = 32; // tokens, as upstream's op_offload

bool multiplies(const ggml_tensor * op) {
    return op->op == GGML_OP_MUL_MAT || op->op == GGML_OP_MUL_MAT_ID;
}

// Whether the operator computes its divided weight in parts: its batch does not move the whole of it.
bool divides(const ggml_tensor * op, int axis) {
    const ggml_tensor * weight = op->src[0];
    if (!multiplies(op) || !(weight->flags & OA_TENSOR_FLAG_DIVIDED) || OA_SEGMENT_AXIS(weight) != axis) {
        return false;
    }
    const int64_t tokens = op->op == GGML_OP_MUL_MAT ? op->ne[1] : op->ne[2];
    if (weight->flags & OA_TENSOR_FLAG_STREAM) {
        return tokens < OA_STREAM_FROM(weight);
    }
    return (weight->flags & OA_TENSOR_FLAG_HOST) || tokens < upload_from;
}

class divider {
  public:
    divider(ggml_context * ctx, ggml_cgraph * graph) : ctx_(ctx), graph_(graph) {
        for (int i = 0; i < ggml_graph_n_nodes(graph); ++i) {
            nodes_.push_back(ggml_graph_node(graph, i));
        }
    }

    void run() {
        for (ggml_tensor * node : nodes_) {
            if (divides(node, 0)) {
                n_ = OA_SEGMENT_COUNT(node->src[0]), width_ = node->src[0]->ne[0];
                if (divisible(node->src[1])) {
                    ggml_tensor * first  = product(node, 0, part(node->src[1], 0));
                    ggml_tensor * second = product(node, 1, part(node->src[1], 1));
                    replace(node, GGML_OP_ADD, first, second);
                }
            }
        }
        for (ggml_tensor * node : nodes_) {
            if (divides(node, 1) && replaced_.count(node) == 0 && idle_.count(node) == 0) {
                ggml_tensor * first  = product(node, 0, node->src[1]);
                ggml_tensor * second = product(node, 1, node->src[1]);
                replace(node, GGML_OP_CONCAT, first, second);
            }
        }
        if (!replaced_.empty()) {
            rebuild();
        }
    }

  private:
    ggml_context *             ctx_;
    ggml_cgraph *              graph_;
    std::vector<ggml_tensor *> nodes_;
    int64_t                    n_ = 0, width_ = 0; // of the block in hand: values on the device, and all of them
    std::set<ggml_tensor *>    replaced_, idle_;   // idle: both of their parts are computed elsewhere

    // ---- the operators between the first matrices of a block and the last ------------------------------------------

    bool is_slice(const ggml_tensor * t) const { return t->op == GGML_OP_NONE && t->ne[0] == width_; } // a bias

    bool divisible(const ggml_tensor * t) const {
        if (t->ne[0] != width_) {
            return false;
        }
        switch (t->op) {
            case GGML_OP_MUL_MAT:
            case GGML_OP_MUL_MAT_ID: return divides(t, 1) && OA_SEGMENT_COUNT(t->src[0]) == n_;
            case GGML_OP_GLU: return t->src[1] && divisible(t->src[0]) && divisible(t->src[1]);
            case GGML_OP_UNARY:
            case GGML_OP_SQR:
            case GGML_OP_SCALE:
            case GGML_OP_CLAMP: return divisible(t->src[0]);
            case GGML_OP_ADD:
            case GGML_OP_MUL:
            case GGML_OP_DIV:
            case GGML_OP_ADD_ID:
                return divisible(t->src[0]) && (is_slice(t->src[1]) || t->src[1]->ne[0] == 1 || divisible(t->src[1]));
            default: return false;
        }
    }

    ggml_tensor * part(ggml_tensor * t, int side) {
        if (is_slice(t)) {
            const int64_t first = side ? n_ : 0, count = side ? width_ - n_ : n_;
            return ggml_view_4d(ctx_, t, count, t->ne[1], t->ne[2], t->ne[3], t->nb[1], t->nb[2], t->nb[3],
                                first * t->nb[0]);
        }
        idle_.insert(t);
        if (multiplies(t)) {
            return product(t, side, t->src[1]);
        }
        ggml_tensor * made = like(t, side);
        made->src[0]       = part(t->src[0], side);
        made->src[1]       = t->src[1] && t->src[1]->ne[0] != 1 ? part(t->src[1], side) : t->src[1];
        made->src[2]       = t->src[2];
        return made;
    }

    // ---- new operators ----------------------------------------------------------------------------------------------

    ggml_tensor * like(const ggml_tensor * t, int side) {
        const int64_t count = t->ne[0] != width_ ? t->ne[0] : side ? width_ - n_ : n_;
        ggml_tensor * made  = ggml_new_tensor_4d(ctx_, t->type, count, t->ne[1], t->ne[2], t->ne[3]);
        made->op            = t->op;
        made->flags         = t->flags & ~(GGML_TENSOR_FLAG_OUTPUT | GGML_TENSOR_FLAG_INPUT);
        std::memcpy(made->op_params, t->op_params, sizeof(made->op_params));
        ggml_format_name(made, "%s (%s)", t->name, side ? "host" : "device");
        return made;
    }

    ggml_tensor * product(ggml_tensor * op, int side, ggml_tensor * input) {
        ggml_tensor * weight = segment(op->src[0], side);
        ggml_tensor * made   = op->op == GGML_OP_MUL_MAT ? ggml_mul_mat(ctx_, weight, input) :
                                                           ggml_mul_mat_id(ctx_, weight, input, op->src[2]);
        std::memcpy(made->op_params, op->op_params, sizeof(made->op_params));
        ggml_format_name(made, "%s (%s)", op->name, side ? "host" : "device");
        return made;
    }

    // A part of the weight: a tensor of its own, or the rest of the whole one, read in place.
    ggml_tensor * segment(ggml_tensor * weight, int side) {
        if (ggml_tensor * own = oa_segment_part(weight, side)) {
            return own;
        }
        const int    axis   = OA_SEGMENT_AXIS(weight);
        const size_t offset = axis == 0 ? ggml_row_size(weight->type, OA_SEGMENT_COUNT(weight)) :
                                          OA_SEGMENT_COUNT(weight) * weight->nb[1];
        int64_t      ne[GGML_MAX_DIMS];
        std::memcpy(ne, weight->ne, sizeof(ne));
        ne[axis] -= OA_SEGMENT_COUNT(weight);
        ggml_tensor * made = ggml_new_tensor(ctx_, weight->type, GGML_MAX_DIMS, ne);
        std::memcpy(made->nb, weight->nb, sizeof(made->nb));
        made->buffer = weight->buffer;
        made->data   = weight->data ? (char *) weight->data + offset : nullptr;
        made->flags |= OA_TENSOR_FLAG_MAPPED | OA_TENSOR_FLAG_HOST;
        ggml_format_name(made, "%s (host)", weight->name);
        return made;
    }

    // Both parts and what joins them are kept in splits of their own (patch 0013).
    void replace(ggml_tensor * op, ggml_op joins, ggml_tensor * device, ggml_tensor * host) {
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

    // ---- the graph --------------------------------------------------------------------------------------------------

    void rebuild() {
        keep_what_is_read();
        ggml_graph_clear(graph_);
        for (ggml_tensor * node : nodes_) {
            if (idle_.count(node)) {
                continue;
            }
            if (replaced_.count(node)) {
                for (int side : { 0, 1 }) {
                    const int first = ggml_graph_n_nodes(graph_);
                    ggml_build_forward_expand(graph_, node->src[side]);
                    mark(first, side);
                }
            }
            ggml_build_forward_expand(graph_, node);
        }
    }

    // The first operator of a part starts a split; the device's part leads.
    void mark(int first, int side) {
        for (int i = first; i < ggml_graph_n_nodes(graph_); ++i) {
            ggml_tensor * node = ggml_graph_node(graph_, i);
            if (multiplies(node)) {
                node->flags |= OA_TENSOR_FLAG_APART | (side == 0 ? OA_TENSOR_FLAG_LEADS : OA_TENSOR_FLAG_FOLLOWS);
                return;
            }
        }
    }

    void keep_what_is_read() {
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
};

} // namespace

void oa_segments_divide(ggml_context * ctx, ggml_cgraph * graph) {
    for (int i = 0; i < ggml_graph_n_nodes(graph); ++i) {
        ggml_tensor * node = ggml_graph_node(graph, i);
        if (divides(node, 0) || divides(node, 1)) {
            divider(ctx, graph).run();
            return;
        }
    }
}
