#include "twins.h"

#include "ggml-backend.h"
#include "tensor_flags.h"

#include <vector>

namespace {

thread_local std::vector<ggml_tensor *> t_weights; // that have twins, of the load in progress

} // namespace

void oa_twins_begin() {
    t_weights.clear();
}

void oa_twins_add(ggml_tensor * weight, ggml_context * ctx) {
    ggml_tensor * twin = ggml_dup_tensor(ctx, weight);
    ggml_format_name(twin, "%s (repacked)", weight->name);
    twin->flags |= OA_TENSOR_FLAG_MAPPED | OA_TENSOR_FLAG_HOST | (weight->flags & OA_TENSOR_FLAG_ARENAS_OFFLINE);
    oa_twin_set(weight, twin);
    t_weights.push_back(weight);
}

void oa_twins_fill() {
    for (const ggml_tensor * weight : t_weights) {
        ggml_backend_tensor_set(oa_twin(weight), weight->data, 0, ggml_nbytes(weight));
    }
    t_weights.clear();
}
