#include "fit.h"

#include "bindings.h"
#include "ggml-backend.h"

namespace {

py::dict fit(const std::string & path, uintptr_t model_params, uintptr_t context_params,
             const std::vector<size_t> & margins, uint32_t n_ctx_min) {
    oa_fit_result result;
    {
        py::gil_scoped_release release;
        result = oa_fit(path, *(const llama_model_params *) model_params,
                        *(const llama_context_params *) context_params, margins, n_ctx_min);
    }
    py::list overrides;
    for (const auto & o : result.overrides) {
        overrides.append(py::make_tuple(o.pattern, o.buffer_type, o.device));
    }
    py::dict d;
    d["status"]       = result.status;
    d["n_gpu_layers"] = result.n_gpu_layers;
    d["tensor_split"] = result.tensor_split;
    d["overrides"]    = overrides;
    d["n_ctx"]        = result.n_ctx;
    d["reason"]       = result.reason;
    d["log"]          = result.log;
    d["errors"]       = result.errors;
    return d;
}

uintptr_t buffer_type_address(const std::string & device) {
    ggml_backend_dev_t dev = ggml_backend_dev_by_name(device.c_str());
    return dev ? (uintptr_t) ggml_backend_dev_buffer_type(dev) : 0;
}

} // namespace

void register_fit(py::module_ & m) {
    m.def("fit", &fit, py::arg("path"), py::arg("model_params"), py::arg("context_params"), py::arg("margins"),
          py::arg("n_ctx_min"),
          "What llama.cpp's --fit chooses when `margins` bytes stay free on each of model_params.devices.");
    m.def("buffer_type_address", &buffer_type_address, py::arg("device"),
          "Address of a device's ggml_backend_buffer_type_t for llama_model_params.tensor_buft_overrides; 0 if there\n"
          "is no such device.");
}
