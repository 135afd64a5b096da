#include "expert_layer.h"

#include <utility>

namespace {

void compute_numbers(ggml_tensor * dst, int ith, int, void * userdata) {
    if (ith != 0) {
        return;
    }
    const ggml_tensor * table  = dst->src[0];
    const ggml_tensor * ids    = dst->src[1];
    const auto *        number = static_cast<const int32_t *>(table->data);
    auto *              out    = static_cast<int32_t *>(dst->data);
    auto *              layer  = static_cast<oa_expert_layer *>(userdata);
    const int64_t       n_used = ids->ne[0], n_tokens = ids->ne[1];
    // A graph that uses all experts warms them up.
    const bool           counts = layer && n_used < table->ne[1];
    std::vector<int32_t> chosen;
    int64_t              n_hits = 0;
    for (int64_t token = 0; token < n_tokens; ++token) {
        for (int64_t rank = 0; rank < n_used; ++rank) {
            int32_t id;
            std::memcpy(&id, static_cast<const char *>(ids->data) + token * ids->nb[1] + rank * ids->nb[0], sizeof(id));
            GGML_ASSERT(id >= 0 && id < table->ne[1]);
            *out++ = number[id];
            n_hits += number[id] < 0;
            if (counts) {
                chosen.push_back(id);
            }
        }
    }
    if (counts) {
        layer->note(chosen, n_used, n_hits);
    }
}

} // namespace

void oa_expert_layer::note(const std::vector<int32_t> & ids, int64_t n_used, int64_t n_hits) {
    uses.fetch_add(int64_t(ids.size()), std::memory_order_relaxed);
    hits.fetch_add(n_hits, std::memory_order_relaxed);
    if (!slots) {
        return;
    }
    const std::lock_guard<std::mutex> lock(mutex_);
    if (n_used_ != n_used) {
        noted_.clear();
        n_used_ = n_used;
    }
    noted_.insert(noted_.end(), ids.begin(), ids.end());
}

std::vector<int32_t> oa_expert_layer::take_noted(int64_t & n_used) {
    const std::lock_guard<std::mutex> lock(mutex_);
    n_used = n_used_;
    return std::exchange(noted_, {});
}

ggml_tensor * oa_host_numbers(ggml_context * ctx, ggml_tensor * table, ggml_tensor * ids, oa_expert_layer * layer) {
    ggml_tensor * sources[] = { table, ids };
    ggml_tensor * made =
        ggml_custom_4d(ctx, GGML_TYPE_I32, ids->ne[0], ids->ne[1], 1, 1, sources, 2, compute_numbers, 1, layer);
    made->flags |= OA_TENSOR_FLAG_HOST;
    return made;
}
