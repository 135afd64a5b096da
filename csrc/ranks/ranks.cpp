#include "ranks.h"

namespace {

const oa_rank_hooks * g_hooks = nullptr;

} // namespace

void oa_ranks_set(const oa_rank_hooks * hooks) {
    g_hooks = hooks;
}

const oa_rank_hooks * oa_ranks() {
    return g_hooks;
}

size_t oa_ranks_own() {
    return g_hooks ? size_t(g_hooks->rank) : 0;
}

void oa_ranks_gather(ggml_backend_t backend, void * data, size_t nbytes, size_t n_rows, size_t stride, size_t owner) {
    if (!g_hooks) {
        return;
    }
    if (backend && int(owner) == g_hooks->rank) {
        ggml_backend_synchronize(backend);
    }
    g_hooks->gather(data, nbytes, n_rows, stride, int(owner));
}
