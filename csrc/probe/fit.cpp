#include "common/fit.h"

#include "fit.h"
#include "fit_log.h"
#include "ggml-backend.h"
#include "log_capture.h"
#include "model_outline.h"

namespace {

const char * name_of(common_params_fit_status status) {
    switch (status) {
        case COMMON_PARAMS_FIT_STATUS_SUCCESS: return "success";
        case COMMON_PARAMS_FIT_STATUS_FAILURE: return "failure";
        default: return "error";
    }
}

const char * device_of(ggml_backend_buffer_type_t buft) {
    ggml_backend_dev_t dev = ggml_backend_buft_get_device(buft);
    return dev ? ggml_backend_dev_name(dev) : "CPU";
}

size_t count(const ggml_backend_dev_t * devices) {
    size_t n = 0;
    while (devices && devices[n]) {
        ++n;
    }
    return n;
}

} // namespace

oa_fit_result oa_fit(const std::string & path, llama_model_params model_params, llama_context_params context_params,
                     std::vector<size_t> margins, uint32_t n_ctx_min) {
    // fit refuses to change a parameter that does not have its default.
    const llama_model_params defaults  = llama_model_default_params();
    model_params.n_gpu_layers          = defaults.n_gpu_layers;
    model_params.tensor_split          = defaults.tensor_split;
    model_params.tensor_buft_overrides = defaults.tensor_buft_overrides;
    model_params.progress_callback     = nullptr;

    std::vector<float>                            tensor_split(llama_max_devices());
    std::vector<llama_model_tensor_buft_override> overrides(llama_max_tensor_buft_overrides() + 1);
    margins.resize(llama_max_devices()); // fit reads one for every device it finds

    oa_fit_result  result;
    oa_log_capture capture;
    oa_fit_log_take();
    const auto outline = oa_model_outline::of(path);
    const auto status  = common_fit_params(outline->path().c_str(), &model_params, &context_params, tensor_split.data(),
                                           overrides.data(), margins.data(), n_ctx_min, nullptr, GGML_LOG_LEVEL_ERROR);
    const oa_fit_log log = oa_fit_log_take();

    result.status       = name_of(status);
    result.n_gpu_layers = model_params.n_gpu_layers;
    tensor_split.resize(count(model_params.devices));
    result.tensor_split = tensor_split;
    for (const auto & override : overrides) {
        if (override.pattern == nullptr) {
            break;
        }
        result.overrides.push_back(
            { override.pattern, ggml_backend_buft_name(override.buft), device_of(override.buft) });
    }
    result.n_ctx = context_params.n_ctx;
    if (status != COMMON_PARAMS_FIT_STATUS_SUCCESS) {
        result.reason = log.last_complaint;
    }
    result.log    = log.text;
    result.errors = capture.errors();
    return result;
}
