#include "graph_threads.h"

#include "busy_cpus.h"
#include "clock.h"
#include "ggml-impl.h"
#include "thread_team.h"
#include "thread_waits.h"

#include <algorithm>

// Operators of others are told how many threads there are: guests' attention is divided alike at home and elsewhere.
static bool depends_on_threads(const ggml_tensor * node) {
    switch (node->op) {
        case GGML_OP_MAP_CUSTOM1:
        case GGML_OP_MAP_CUSTOM2:
        case GGML_OP_MAP_CUSTOM3:
        case GGML_OP_CUSTOM: return true;
        case GGML_OP_MUL_MAT:
        case GGML_OP_MUL_MAT_ID:
#if defined(__ARM_FEATURE_MATMUL_INT8)
            return true; // upstream's dot products take two rows at once, where a thread has an even number
#endif
        default: return false;
    }
}

int oa_graph_threads(const ggml_cgraph * graph, int n_threads) {
    if (n_threads < 2 || oa_team_keeps()) {
        return n_threads;
    }
    const double now  = oa_now();
    const int    free = oa_free_cpus(now, now - oa_team_ended(), 1 + oa_n_idle_spinners(), n_threads);
    if (free >= n_threads || std::any_of(graph->nodes, graph->nodes + graph->n_nodes, depends_on_threads)) {
        return n_threads;
    }
    return std::max(free, (n_threads + 1) / 2);
}
