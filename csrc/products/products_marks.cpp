#include "products_marks.h"

#include "cpu_functions.h"
#include "own_products.h"
#include "tensor_flags.h"
#include "weight_stream.h"

namespace {

// Whether the CPU multiplies by a tiled weight: one that is streamed is an accelerator's.
bool is_tiled(const ggml_tensor * node) {
    const bool          multiplies = node->op == GGML_OP_MUL_MAT || node->op == GGML_OP_MUL_MAT_ID;
    const ggml_tensor * weight     = node->src[0];
    return multiplies && (weight->flags & OA_TENSOR_FLAG_TILED) &&
           !((weight->flags & OA_TENSOR_FLAG_STREAM) && oa_stream_wanted(node, weight));
}

} // namespace

void oa_products_mark(ggml_cgraph * graph) {
    for (int i = 0; i < ggml_graph_n_nodes(graph); ++i) {
        ggml_tensor * node = ggml_graph_node(graph, i);
        if (!is_tiled(node)) {
            continue;
        }
        ggml_tensor * twin = oa_twin(node->src[0]);
        if (twin && OA_OF_CPU(oa_products_refusal)(node)) {
            ggml_build_forward_expand(graph, twin); // a leaf, as the weight is
            node->src[0] = twin;
        } else {
            node->op_params[OA_PRODUCTS_PARAM] = 1;
        }
    }
}
