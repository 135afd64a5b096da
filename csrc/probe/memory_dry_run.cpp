#include "memory_dry_run.h"

#include "ggml-backend.h"
#include "llama-context.h"
#include "llama-ext.h"
#include "model_skeleton.h"
#include "tensor_flags.h"

#include <algorithm>

namespace {

constexpr auto mapped_file = "CPU_Mapped";

bool is_lazy(const ggml_tensor * tensor) {
    return (tensor->flags & OA_TENSOR_FLAG_LAZY) != 0;
}

// Of what a mapped buffer spans, other tensors lie in buffers of their own: those pages nobody reads. Nor are those of
// lazy tables in memory, but for rows that were wanted, which the kernel may take back.
size_t mapped_nbytes(const llama_model * model) {
    size_t nbytes = 0;
    for (const auto & [name, tensor] : llama_internal_get_tensor_map(model)) {
        if (tensor->buffer && !is_lazy(tensor) &&
            std::string(ggml_backend_buffer_name(tensor->buffer)) == mapped_file) {
            nbytes += ggml_nbytes(tensor);
        }
    }
    return nbytes;
}

// A dry run maps nothing: it counts lazy tables with the other weights of their buffer type.
size_t lazy_nbytes(const llama_model * model, ggml_backend_buffer_type_t buft) {
    size_t nbytes = 0;
    for (const auto & [name, tensor] : llama_internal_get_tensor_map(model)) {
        if (tensor->buffer && is_lazy(tensor) && ggml_backend_buffer_get_type(tensor->buffer) == buft) {
            nbytes += ggml_backend_buft_get_alloc_size(buft, tensor);
        }
    }
    return nbytes;
}

} // namespace

std::vector<oa_buffer_bytes> oa_memory_of(const llama_context * context) {
    std::vector<oa_buffer_bytes> result;
    for (const auto & [buft, bytes] : llama_get_memory_breakdown(context)) {
        ggml_backend_dev_t  dev   = ggml_backend_buft_get_device(buft);
        const std::string   name  = ggml_backend_buft_name(buft);
        const llama_model * model = llama_get_model(context);
        const size_t weights      = name == mapped_file ? mapped_nbytes(model) : bytes.model - lazy_nbytes(model, buft);
        result.push_back({ name, dev ? ggml_backend_dev_name(dev) : "CPU", ggml_backend_buft_is_host(buft), weights,
                           bytes.context, bytes.compute });
    }
    return result;
}

std::vector<oa_buffer_bytes> oa_memory_dry_run(const std::string & path, const llama_model_params & model_params,
                                               const llama_context_params & context_params, bool heads_guess) {
    oa_model_skeleton            skeleton(path, model_params, context_params);
    std::vector<oa_buffer_bytes> result = oa_memory_of(skeleton.context());
    if (heads_guess) {
        skeleton.let_heads_guess();
        skeleton.context()->sched_reserve();
        const std::vector<oa_buffer_bytes> later = oa_memory_of(skeleton.context());
        for (size_t i = 0; i < result.size(); ++i) { // buffers that are there only grow
            result[i].compute = std::max(result[i].compute, later[i].compute);
        }
    }
    return result;
}
