#include "graph_run.h"

namespace {

thread_local int n_runs     = 0;
thread_local void (*then)() = nullptr;

} // namespace

void oa_graph_run_begin() {
    ++n_runs;
}

void oa_graph_run_end() {
    if (--n_runs == 0 && then) {
        void (*const wish)() = then;
        then                 = nullptr;
        wish();
    }
}

bool oa_graph_run_then(void (*wish)()) {
    if (n_runs > 0) {
        then = wish;
    }
    return n_runs > 0;
}
