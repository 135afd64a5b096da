// How many threads compute a graph. C and C++. It lies here because it asks which instructions a CPU backend has.
#pragma once

#include "ggml.h"

#ifdef __cplusplus
extern "C" {
#endif

// As many as CPUs are free, and at least half of n_threads: a thread that shares its CPU with another program holds up
// all others at every operator. Where another program needs a CPU for a part of the time, one less if that turns out to
// be faster (thread_trial.h). n_threads for graphs whose results depend on it, and after `oa_team_keep(true)`. The
// graph must be computed before the next call of this thread.
int oa_graph_threads(const struct ggml_cgraph * graph, int n_threads);

// Into how many parts upstream's fused attention divides one token's keys and values, which n_threads compute: as many
// as threads were asked for. Results depend on it.
struct ggml_threadpool;
int oa_parts_of(const struct ggml_threadpool * pool, int n_threads);

#ifdef __cplusplus
}
#endif
