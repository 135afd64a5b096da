// How many threads compute a graph. C and C++. It lies here because it asks which attention is ours.
#pragma once

#include "ggml.h"

#ifdef __cplusplus
extern "C" {
#endif

// As many as CPUs are free, and at least half of n_threads: a thread that shares its CPU with another program holds up
// all others at every operator. n_threads for graphs whose results depend on it, and where `oa_team_keep` was
// called.
int oa_graph_threads(const struct ggml_cgraph * graph, int n_threads);

#ifdef __cplusplus
}
#endif
