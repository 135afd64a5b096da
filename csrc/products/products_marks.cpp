#include "products_marks.h"

#include "own_products.h"
#include "tensor_flags.h"

void oa_products_mark(ggml_cgraph * graph) {
    for (int i = 0; i < ggml_graph_n_nodes(graph); ++i) {
        ggml_tensor * node       = ggml_graph_node(graph, i);
        const bool    multiplies = node->op == GGML_OP_MUL_MAT || node->op == GGML_OP_MUL_MAT_ID;
        if (multiplies && (node->src[0]->flags & OA_TENSOR_FLAG_TILED)) {
            node->op_params[OA_PRODUCTS_PARAM] = 1;
        }
    }
}
