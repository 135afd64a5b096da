#include "host_weights.h"

#include "host_memory.h"

#include <algorithm>

namespace {

thread_local size_t t_repackable  = 0; // bytes that repacked weights may still take
thread_local size_t t_left_mapped = 0; // bytes

} // namespace

void oa_host_weights_begin() {
    // The rest is for KV caches, compute buffers and everybody else.
    const size_t memory = oa_host_memory();
    t_repackable        = memory - std::max(memory / 8, std::min(memory / 2, size_t(512) << 20));
    t_left_mapped       = 0;
}

bool oa_host_weights_take(size_t nbytes, bool mapped) {
    if (!mapped || nbytes <= t_repackable) {
        t_repackable -= std::min(nbytes, t_repackable);
        return true;
    }
    t_left_mapped += nbytes;
    return false;
}

bool oa_host_weights_take_twin(size_t nbytes, bool mapped) {
    if (mapped && 2 * nbytes > t_repackable) {
        t_left_mapped += nbytes;
        return false;
    }
    t_repackable -= std::min(2 * nbytes, t_repackable);
    return true;
}

bool oa_host_weights_take_part(size_t nbytes, bool mapped) {
    if (!mapped || nbytes > t_repackable) {
        return false;
    }
    t_repackable -= nbytes;
    return true;
}

size_t oa_host_weights_left_mapped() {
    return t_left_mapped;
}
