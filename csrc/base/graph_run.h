// A run of the scheduler: the splits of a graph, one after another, by one thread. What a backend wants to do once for
// all of its splits it asks for here, since ggml-base cannot link backends. Hook: patch 0012.
#pragma once

#include "ggml.h"

GGML_API void oa_graph_run_begin();
GGML_API void oa_graph_run_end();

// There for as long as the run.
struct oa_graph_run {
    oa_graph_run() { oa_graph_run_begin(); }
    ~oa_graph_run() { oa_graph_run_end(); }

    oa_graph_run(const oa_graph_run &)             = delete;
    oa_graph_run & operator=(const oa_graph_run &) = delete;
};

// At the end of this thread's run, once; there is one such wish for all. False: no run is under way (a graph that is
// computed without a scheduler).
GGML_API bool oa_graph_run_then(void (*wish)());
