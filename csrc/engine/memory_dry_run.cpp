#include "memory_dry_run.h"

#include "ggml-backend.h"
#include "llama-ext.h"
#include "model_skeleton.h"

std::vector<oa_buffer_bytes> oa_memory_of(const llama_context * context) {
    std::vector<oa_buffer_bytes> result;
    for (const auto & [buft, bytes] : llama_get_memory_breakdown(context)) {
        ggml_backend_dev_t dev = ggml_backend_buft_get_device(buft);
        result.push_back({ ggml_backend_buft_name(buft), dev ? ggml_backend_dev_name(dev) : "CPU",
                           ggml_backend_buft_is_host(buft), bytes.model, bytes.context, bytes.compute });
    }
    return result;
}

std::vector<oa_buffer_bytes> oa_memory_dry_run(const std::string & path, const llama_model_params & model_params,
                                               const llama_context_params & context_params) {
    const oa_model_skeleton skeleton(path, model_params, context_params);
    return oa_memory_of(skeleton.context());
}
