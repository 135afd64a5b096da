#include "graph_threads.h"

#include "busy_cpus.h"
#include "clock.h"
#include "ggml-impl.h"
#include "thread_team.h"
#include "thread_trial.h"
#include "thread_waits.h"

#include <algorithm>
#include <cstdint>

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

// Alike for the passes of one model over as many tokens, and for their parts between the same devices.
static uint64_t kind_of(const ggml_cgraph * graph, int least, int most) {
    uint64_t kind = 0;
    for (const int64_t number :
         { int64_t(graph->n_nodes), graph->nodes[0]->ne[0], graph->nodes[0]->ne[1], int64_t(least), int64_t(most) }) {
        kind = (kind + uint64_t(number)) * 0x9e3779b97f4a7c15;
    }
    return kind;
}

int oa_graph_threads(const ggml_cgraph * graph, int n_threads) {
    thread_local ThreadTrial trial;
    thread_local double      tried = 0.0; // when the last graph of a trial began
    if (tried > 0.0) {
        trial.took(oa_team_ended() - tried);
        tried = 0.0;
    }
    if (n_threads < 2 || graph->n_nodes == 0 || oa_team_keeps()) {
        return n_threads;
    }
    const double  now  = oa_now();
    const oa_free free = oa_free_cpus(now, now - oa_team_ended(), 1 + oa_n_idle_spinners(), n_threads);
    if (free.wholly >= n_threads || std::any_of(graph->nodes, graph->nodes + graph->n_nodes, depends_on_threads)) {
        return n_threads;
    }
    const int most  = std::clamp(free.mostly, (n_threads + 1) / 2, n_threads);
    const int least = std::clamp(free.wholly, std::max(most - 1, (n_threads + 1) / 2), most);
    if (least == most) {
        return most;
    }
    tried = now;
    return trial.takes_fewer(kind_of(graph, least, most), now) ? least : most;
}
