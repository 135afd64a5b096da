// Rewrites a graph whose weights are divided by rows or columns (segments.h).
#include "graph_rewrite.h"
#include "tensor_flags.h"

#include <cstring>

namespace {

// Whether the operator computes its divided weight in parts along this axis.
bool divides(const ggml_tensor * op, oa_segment_axis axis) {
    return oa_multiplies(op) && oa_is_divided(op->src[0], axis) && oa_computed_in_parts(op, op->src[0]);
}

class divider : oa_graph_rewrite {
  public:
    using oa_graph_rewrite::oa_graph_rewrite;

    void run() {
        for (ggml_tensor * node : nodes_) {
            if (divides(node, oa_segment_axis::columns)) {
                n_ = OA_SEGMENT_COUNT(node->src[0]), width_ = node->src[0]->ne[0];
                if (divisible(node->src[1])) {
                    ggml_tensor * first  = product(node, OA_DEVICE, part(node->src[1], OA_DEVICE));
                    ggml_tensor * second = product(node, OA_HOST, part(node->src[1], OA_HOST));
                    replace(node, GGML_OP_ADD, first, second);
                }
            }
        }
        for (ggml_tensor * node : nodes_) {
            if (divides(node, oa_segment_axis::rows) && replaced_.count(node) == 0 && idle_.count(node) == 0) {
                ggml_tensor * first  = product(node, OA_DEVICE, node->src[1]);
                ggml_tensor * second = product(node, OA_HOST, node->src[1]);
                replace(node, GGML_OP_CONCAT, first, second);
            }
        }
        if (!replaced_.empty()) {
            rebuild();
        }
    }

  private:
    int64_t n_ = 0, width_ = 0; // of the block in hand: values on the device, and all of them

    // ---- the operators between the first matrices of a block and the last ------------------------------------------

    bool is_slice(const ggml_tensor * t) const { return t->op == GGML_OP_NONE && t->ne[0] == width_; } // a bias

    bool divisible(const ggml_tensor * t) const {
        if (t->ne[0] != width_) {
            return false;
        }
        switch (t->op) {
            case GGML_OP_MUL_MAT:
            case GGML_OP_MUL_MAT_ID: return divides(t, oa_segment_axis::rows) && OA_SEGMENT_COUNT(t->src[0]) == n_;
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

    ggml_tensor * part(ggml_tensor * t, oa_side side) {
        if (is_slice(t)) {
            const int64_t first = side ? n_ : 0, count = side ? width_ - n_ : n_;
            return ggml_view_4d(ctx_, t, count, t->ne[1], t->ne[2], t->ne[3], t->nb[1], t->nb[2], t->nb[3],
                                first * t->nb[0]);
        }
        idle_.insert(t);
        if (oa_multiplies(t)) {
            return product(t, side, t->src[1]);
        }
        ggml_tensor * made = like(t, t->ne[0] != width_ ? t->ne[0] : side ? width_ - n_ : n_, side);
        made->src[0]       = part(t->src[0], side);
        made->src[1]       = t->src[1] && t->src[1]->ne[0] != 1 ? part(t->src[1], side) : t->src[1];
        made->src[2]       = t->src[2];
        return made;
    }

    // ---- new operators ----------------------------------------------------------------------------------------------

    ggml_tensor * product(ggml_tensor * op, oa_side side, ggml_tensor * input) {
        ggml_tensor * weight = segment(op->src[0], side);
        ggml_tensor * made   = op->op == GGML_OP_MUL_MAT ? ggml_mul_mat(ctx_, weight, input) :
                                                           ggml_mul_mat_id(ctx_, weight, input, op->src[2]);
        std::memcpy(made->op_params, op->op_params, sizeof(made->op_params));
        ggml_format_name(made, "%s (%s)", op->name, side ? "host" : "device");
        return made;
    }

    // A part of the weight: a tensor of its own, or the rest of the whole one, read in place.
    ggml_tensor * segment(ggml_tensor * weight, oa_side side) {
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
};

} // namespace

void oa_divide_values(ggml_context * ctx, ggml_cgraph * graph) {
    for (int i = 0; i < ggml_graph_n_nodes(graph); ++i) {
        ggml_tensor * node = ggml_graph_node(graph, i);
        if (divides(node, oa_segment_axis::columns) || divides(node, oa_segment_axis::rows)) {
            divider(ctx, graph).run();
            return;
        }
    }
}
