#include "ranks.h"

#include <algorithm>
#include <cmath>

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

int64_t oa_ranks_boundary(float share, int64_t ne, int64_t piece) {
    // Counted in pieces: heads, their queries and their caches have as many, so they end at the same one.
    const double pieces = double(ne) / double(piece);
    return piece * std::min(std::llround(double(share) * pieces), (long long) (ne / piece));
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
