// What every division does to a graph: an operator becomes what joins two chains, the accelerator's and the host's.
//
// The operator is replaced in place: whoever holds a pointer to it (outputs, callbacks) reads the same values as
// before. What nobody reads any more is left out of the graph.
#pragma once

#include "division.h"
#include "ggml.h"
#include "tensor_flags.h"

#include <map>
#include <set>
#include <vector>

enum oa_side { OA_DEVICE = 0, OA_HOST = 1 };

inline bool oa_multiplies(const ggml_tensor * op) {
    return op->op == GGML_OP_MUL_MAT || op->op == GGML_OP_MUL_MAT_ID;
}

inline bool oa_is_divided(const ggml_tensor * weight, oa_segment_axis axis) {
    return (weight->flags & OA_TENSOR_FLAG_DIVIDED) && oa_segment_axis(OA_SEGMENT_AXIS(weight)) == axis;
}

// Whether an operator computes its divided weight, `weight`, in parts: its batch does not move the whole of it.
bool oa_computed_in_parts(const ggml_tensor * op, const ggml_tensor * weight);

class oa_graph_rewrite {
  public:
    oa_graph_rewrite(ggml_context * ctx, ggml_cgraph * graph);

  protected:
    ggml_context *             ctx_;
    std::vector<ggml_tensor *> nodes_;
    std::set<ggml_tensor *>    replaced_, idle_; // idle: both of their parts are computed elsewhere

    // A new operator like `t` with `count` values in a row; it has no sources yet.
    ggml_tensor * like(const ggml_tensor * t, int64_t count, oa_side side);

    // The operator joins both parts from now on.
    void replace(ggml_tensor * op, ggml_op joins, ggml_tensor * device, ggml_tensor * host);

    // The graph anew, from its nodes. Both parts and what joins them are in splits of their own (patch 0013).
    void rebuild();

  private:
    ggml_cgraph * graph_;

    void keep_what_is_read();
    void mark_first(int first, oa_side side);
};

// Graphs whose weights are divided by rows or columns, and by experts; others stay as they are.
void oa_divide_values(ggml_context * ctx, ggml_cgraph * graph);
void oa_divide_experts(ggml_context * ctx, ggml_cgraph * graph);
