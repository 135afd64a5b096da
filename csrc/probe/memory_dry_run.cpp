#include "memory_dry_run.h"

#include "ggml-backend.h"
#include "llama-ext.h"
#include "model_skeleton.h"

namespace {

constexpr auto mapped_file = "CPU_Mapped";

// Of what a mapped buffer spans, other tensors lie in buffers of their own: those pages nobody reads.
size_t mapped_nbytes(const llama_model * model) {
    size_t nbytes = 0;
    for (const auto & [name, tensor] : llama_internal_get_tensor_map(model)) {
        if (tensor->buffer && std::string(ggml_backend_buffer_name(tensor->buffer)) == mapped_file) {
            nbytes += ggml_nbytes(tensor);
        }
    }
    return nbytes;
}

} // namespace

std::vector<oa_buffer_bytes> oa_memory_of(const llama_context * context) {
    std::vector<oa_buffer_bytes> result;
    for (const auto & [buft, bytes] : llama_get_memory_breakdown(context)) {
        ggml_backend_dev_t dev     = ggml_backend_buft_get_device(buft);
        const std::string  name    = ggml_backend_buft_name(buft);
        const size_t       weights = name == mapped_file ? mapped_nbytes(llama_get_model(context)) : bytes.model;
        result.push_back({ name, dev ? ggml_backend_dev_name(dev) : "CPU", ggml_backend_buft_is_host(buft), weights,
                           bytes.context, bytes.compute });
    }
    return result;
}

std::vector<oa_buffer_bytes> oa_memory_dry_run(const std::string & path, const llama_model_params & model_params,
                                               const llama_context_params & context_params) {
    const oa_model_skeleton skeleton(path, model_params, context_params);
    return oa_memory_of(skeleton.context());
}
