#include "graph_threads.h"

#include "busy_cpus.h"
#include "clock.h"
#include "ggml-impl.h"
#include "own_attention.h"
#include "thread_team.h"
#include "thread_waits.h"

#include <algorithm>

// Upstream divides one token's attention to 512 or more by threads, and adds up in f16.
static bool depends_on_threads(const ggml_cgraph * graph) {
    return std::any_of(graph->nodes, graph->nodes + graph->n_nodes, [](const ggml_tensor * node) {
        return node->op == GGML_OP_FLASH_ATTN_EXT && node->src[1]->ne[1] >= 512 && !oa_attend_takes(node);
    });
}

int oa_graph_threads(const ggml_cgraph * graph, int n_threads) {
    if (oa_team_keeps()) {
        return n_threads;
    }
    const int free = oa_free_cpus(oa_now(), 1 + oa_n_idle_spinners());
    if (free >= n_threads || depends_on_threads(graph)) {
        return n_threads;
    }
    return std::max(free, (n_threads + 1) / 2);
}
