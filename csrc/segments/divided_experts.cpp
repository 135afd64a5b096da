// Rewrites a graph in which experts of a layer are divided between two devices (segments.h).
//
// The accelerator's chain computes the choices of its experts, the host's those of all others, from up and gate to the
// sum of a token's experts. Each side gets the choices as numbers among its own experts: what belongs to the other side
// is one more expert of zeros on the accelerator, and -1 on the host (skipped_experts.h). So every value of a chain is
// either computed there or unread on the way to a zero. The host notes the choices on the way (expert_layer.h).
#include "expert_layer.h"
#include "graph_rewrite.h"
#include "skipped_experts.h"
#include "tensor_flags.h"

#include <algorithm>
#include <cstring>
#include <string>

namespace {

const ggml_tensor * weight_of(const ggml_tensor * op) {
    return oa_multiplies(op) ? op->src[0] : op->op == GGML_OP_ADD_ID ? op->src[1] : nullptr;
}

bool has_divided(const ggml_tensor * op) {
    const ggml_tensor * weight = weight_of(op);
    return weight && oa_is_divided(weight, oa_segment_axis::experts);
}

// Whether the operator multiplies with the experts of each side.
bool divides(const ggml_tensor * op) {
    return op->op == GGML_OP_MUL_MAT_ID && has_divided(op) && oa_computed_in_parts(op, op->src[0]);
}

// Whether both have the same experts on the accelerator.
bool alike(const ggml_tensor * a, const ggml_tensor * b) {
    const ggml_tensor *of_a = oa_expert_table(a, OA_HOST), *of_b = oa_expert_table(b, OA_HOST);
    if (ggml_nelements(of_a) != ggml_nelements(of_b) || OA_SEGMENT_COUNT(a) != OA_SEGMENT_COUNT(b)) {
        return false;
    }
    if (oa_expert_layer::has_slots(a) || oa_expert_layer::has_slots(b)) {
        return of_a == of_b;
    }
    const auto *x = static_cast<const int32_t *>(of_a->data), *y = static_cast<const int32_t *>(of_b->data);
    for (int64_t e = 0; x && y && e < ggml_nelements(of_a); ++e) {
        if ((x[e] < 0) != (y[e] < 0)) {
            return false;
        }
    }
    return true;
}

// Tokens of the graph's batch. Its last layer may have fewer: those whose logits are wanted.
int64_t n_tokens_of(ggml_cgraph * graph) {
    const ggml_tensor * const tokens = ggml_graph_get_tensor(graph, "inp_tokens");
    const ggml_tensor * const rows   = ggml_graph_get_tensor(graph, "inp_embd");
    return std::max(tokens ? tokens->ne[0] : 0, rows ? rows->ne[1] : 0);
}

class divider : oa_graph_rewrite {
  public:
    divider(ggml_context * ctx, ggml_cgraph * graph) :
        oa_graph_rewrite(ctx, graph), decodes_(n_tokens_of(graph) <= oa_decode_tokens) {
        for (ggml_tensor * node : nodes_) {
            for (ggml_tensor * src : node->src) {
                if (src) {
                    readers_[src].push_back(node);
                }
            }
        }
    }

    void run() {
        // A block ends with what none of the others reads; alone, a matrix is a block.
        for (auto it = nodes_.rbegin(); it != nodes_.rend(); ++it) {
            if (divides(*it) && idle_.count(*it) == 0 && replaced_.count(*it) == 0) {
                divide(*it);
            }
        }
        if (!replaced_.empty()) {
            rebuild();
        }
    }

  private:
    const bool                                                decodes_; // a few tokens, whose choices are noted
    std::map<const ggml_tensor *, std::vector<ggml_tensor *>> readers_;
    std::set<const ggml_tensor *>                             noted_; // choices

    // Of the block in hand.
    const ggml_tensor *                                                    weight_ = nullptr;
    std::map<const ggml_tensor *, ggml_tensor *>                           made_[2];
    std::map<std::pair<const ggml_tensor *, ggml_tensor *>, ggml_tensor *> choices_[2]; // by table and ids

    void divide(ggml_tensor * last) {
        weight_ = last->src[0];
        for (const oa_side side : { OA_DEVICE, OA_HOST }) {
            made_[side].clear();
            choices_[side].clear();
        }
        ggml_tensor * const joined = end_of(last);
        ggml_tensor * const device = part(joined, OA_DEVICE);
        ggml_tensor * const host   = part(joined, OA_HOST);
        idle_.erase(joined);
        replace(joined, GGML_OP_ADD, device, host);
    }

    // ---- how far a block reaches -----------------------------------------------------------------------------------

    ggml_tensor * only_reader(const ggml_tensor * t) const {
        const auto it        = readers_.find(t);
        const bool is_result = t->flags & GGML_TENSOR_FLAG_OUTPUT;
        return it == readers_.end() || it->second.size() != 1 || is_result ? nullptr : it->second.front();
    }

    // From the block's last matrix on: biases of its experts, weights of the choices, and the sum over a token's
    // choices. What a token did not choose here is zero, and stays so.
    ggml_tensor * end_of(ggml_tensor * last) const {
        ggml_tensor * end = last;
        for (ggml_tensor * next = only_reader(end); next && keeps_zeros(next, end); next = only_reader(end)) {
            end = next;
        }
        ggml_tensor * const sum = sum_of(end);
        return sum ? sum : end;
    }

    bool keeps_zeros(const ggml_tensor * op, const ggml_tensor * of) const {
        if (op->src[0] != of || !ggml_are_same_shape(op, of)) {
            return false;
        }
        return op->op == GGML_OP_MUL ? op->src[1] != of :
                                       op->op == GGML_OP_ADD_ID && has_divided(op) && alike(op->src[1], weight_);
    }

    // The last of the additions that sum up all rows of a token; nullptr: there are none.
    ggml_tensor * sum_of(const ggml_tensor * experts) const {
        const auto it = readers_.find(experts);
        if (it == readers_.end() || int64_t(it->second.size()) != experts->ne[1] || experts->ne[1] < 2) {
            return nullptr;
        }
        std::set<const ggml_tensor *> rows;
        for (const ggml_tensor * view : it->second) {
            if (view->op != GGML_OP_VIEW || !only_reader(view)) {
                return nullptr;
            }
            rows.insert(view);
        }
        ggml_tensor * sum = only_reader(it->second.front());
        size_t        n   = 1;
        while (sum && sum->op == GGML_OP_ADD && rows.count(sum->src[1]) && (n > 1 || rows.count(sum->src[0]))) {
            if (++n == rows.size()) {
                return sum;
            }
            ggml_tensor * const next = only_reader(sum);
            if (!next || next->src[0] != sum) {
                return nullptr;
            }
            sum = next;
        }
        return nullptr;
    }

    // Whether a side can compute the operator from what it computes of its sources.
    bool in_chain(const ggml_tensor * t) const {
        switch (t->op) {
            case GGML_OP_MUL_MAT_ID: return divides(t) && alike(t->src[0], weight_);
            case GGML_OP_GLU: return in_chain(t->src[0]) && (!t->src[1] || in_chain(t->src[1]));
            case GGML_OP_VIEW:
            case GGML_OP_UNARY:
            case GGML_OP_SQR:
            case GGML_OP_SCALE:
            case GGML_OP_CLAMP:
            case GGML_OP_ADD:
            case GGML_OP_MUL: return in_chain(t->src[0]);
            case GGML_OP_ADD_ID: return in_chain(t->src[0]) && has_divided(t) && alike(t->src[1], weight_);
            default: return false;
        }
    }

    // ---- new operators ---------------------------------------------------------------------------------------------

    ggml_tensor * part(ggml_tensor * t, oa_side side) {
        ggml_tensor *& made = made_[side][t];
        if (!made) {
            idle_.insert(t);
            made = t->op == GGML_OP_MUL_MAT_ID ? product(t, side) :
                   t->op == GGML_OP_ADD_ID     ? biased(t, side) :
                   t->op == GGML_OP_VIEW       ? view(t, side) :
                                                 same(t, side);
        }
        return made;
    }

    // What an operator reads: a side's own part, where the source belongs to the chain.
    ggml_tensor * source(ggml_tensor * t, oa_side side) { return !t || !belongs(t) ? t : part(t, side); }

    bool belongs(const ggml_tensor * t) const { return made_[OA_DEVICE].count(t) || after_last(t) || in_chain(t); }

    // Whether the operator lies between the block's last matrix and its end.
    bool after_last(const ggml_tensor * t) const {
        const bool follows =
            t->op == GGML_OP_ADD || t->op == GGML_OP_MUL || t->op == GGML_OP_VIEW || t->op == GGML_OP_ADD_ID;
        return t->op == GGML_OP_MUL_MAT_ID ? t->src[0] == weight_ : follows && after_last(t->src[0]);
    }

    ggml_tensor * product(ggml_tensor * op, oa_side side) {
        ggml_tensor * const weight = segment(op->src[0], side);
        ggml_tensor * const made =
            ggml_mul_mat_id(ctx_, weight, source(op->src[1], side), choices(op->src[0], op->src[2], side));
        std::memcpy(made->op_params, op->op_params, sizeof(made->op_params));
        made->op_params[OA_LAST_NOTHING_PARAM] = side == OA_DEVICE;
        ggml_format_name(made, "%s (%s)", op->name, side ? "host" : "device");
        return made;
    }

    ggml_tensor * biased(ggml_tensor * op, oa_side side) {
        ggml_tensor * const made = like(op, op->ne[0], side);
        made->src[0]             = source(op->src[0], side);
        made->src[1]             = segment(op->src[1], side);
        made->src[2]             = choices(op->src[1], op->src[2], side);
        return pinned(made, side);
    }

    ggml_tensor * view(ggml_tensor * op, oa_side side) {
        ggml_tensor * const made =
            ggml_view_4d(ctx_, source(op->src[0], side), op->ne[0], op->ne[1], op->ne[2], op->ne[3], op->nb[1],
                         op->nb[2], op->nb[3], op->view_offs - op->src[0]->view_offs);
        ggml_format_name(made, "%s (%s)", op->name, side ? "host" : "device");
        return made;
    }

    ggml_tensor * same(ggml_tensor * op, oa_side side) {
        ggml_tensor * const made = like(op, op->ne[0], side);
        for (int i = 0; i < GGML_MAX_SRC; ++i) {
            made->src[i] = source(op->src[i], side);
        }
        return pinned(made, side);
    }

    // The scheduler would give an accelerator what follows the host's last matrix.
    static ggml_tensor * pinned(ggml_tensor * made, oa_side side) {
        made->flags |= side == OA_HOST ? OA_TENSOR_FLAG_HOST : 0;
        return made;
    }

    // The experts of a side: a tensor of their own, or all of them, read in place.
    static ggml_tensor * segment(ggml_tensor * weight, oa_side side) {
        ggml_tensor * const own = oa_segment_part(weight, side);
        return own ? own : weight;
    }

    // The choices as numbers among a side's experts.
    ggml_tensor * choices(const ggml_tensor * weight, ggml_tensor * ids, oa_side side) {
        ggml_tensor *& made = choices_[side][{ key_of(weight, side), ids }];
        if (!made) {
            made = side == OA_HOST ? on_host(weight, ids) : on_device(weight, ids);
            ggml_format_name(made, "%s (%s)", ids->name, side ? "host" : "device");
        }
        return made;
    }

    // Of several operators for the same choices one notes them. A prompt's last layer has the choices of its last
    // token.
    ggml_tensor * on_host(const ggml_tensor * weight, ggml_tensor * ids) {
        const bool              notes = decodes_ && noted_.insert(ids).second;
        oa_expert_layer * const layer = notes ? oa_expert_layer::of(weight) : nullptr;
        return oa_host_numbers(ctx_, oa_expert_table(weight, OA_HOST), ids, layer);
    }

    ggml_tensor * on_device(const ggml_tensor * weight, ggml_tensor * ids) {
        ggml_tensor * const own = ggml_get_rows(ctx_, for_each_token(weight, ids->ne[1]), ids);
        ggml_format_name(own, "%s (device)", ids->name);
        return ggml_reshape_2d(ctx_, own, ids->ne[0], ids->ne[1]);
    }

    // The table as often as there are tokens, in place: no view, so that the scheduler knows it for a weight.
    ggml_tensor * for_each_token(const ggml_tensor * weight, int64_t n_tokens) {
        const ggml_tensor * const table = oa_expert_table(weight, OA_DEVICE);
        ggml_tensor * const       made  = ggml_new_tensor_3d(ctx_, table->type, 1, table->ne[1], n_tokens);
        made->nb[2]                     = 0;
        made->buffer                    = table->buffer;
        made->data                      = row_of(weight, table);
        made->flags |= table->flags;
        ggml_format_name(made, "%s", table->name);
        return made;
    }

    // A dry run has no memory.
    static void * row_of(const ggml_tensor * weight, const ggml_tensor * table) {
        const bool    has_slots = oa_expert_layer::has_slots(weight);
        const int64_t row       = has_slots ? oa_expert_layer::of(weight)->slots->row : 0;
        return table->data ? static_cast<char *>(table->data) + row * int64_t(table->nb[2]) : nullptr;
    }

    // Weights of one block have the same table, but for those that the host reads in place beside others with a copy.
    const ggml_tensor * key_of(const ggml_tensor * weight, oa_side side) const {
        const bool like_last = !oa_segment_part(weight, side) == !oa_segment_part(weight_, side);
        return oa_expert_table(like_last ? weight_ : weight, side);
    }
};

} // namespace

void oa_divide_experts(ggml_context * ctx, ggml_cgraph * graph) {
    for (int i = 0; i < ggml_graph_n_nodes(graph); ++i) {
        if (divides(ggml_graph_node(graph, i))) {
            divider(ctx, graph).run();
            return;
        }
    }
}
