#include "attend_marks.h"

#include "own_attention.h"
#include "tensor_flags.h"

void oa_attend_mark(const ggml_tensor * embedding, ggml_cgraph * graph) {
    if (!embedding || !(embedding->flags & OA_TENSOR_FLAG_ATTENDS)) {
        return;
    }
    for (int i = 0; i < ggml_graph_n_nodes(graph); ++i) {
        ggml_tensor * node = ggml_graph_node(graph, i);
        if (node->op == GGML_OP_FLASH_ATTN_EXT && !node->op_params[OA_ATTEND_PARAM]) {
            node->op_params[OA_ATTEND_PARAM] = OA_ATTEND_TOGETHER;
        }
    }
}
