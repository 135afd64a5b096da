#include "tensor_places.h"

#include "gguf_keys.h"

#include <stdexcept>

oa_file_outline oa_tensor_places(const std::string & path) {
    ggml_context *         raw = nullptr;
    const gguf_context_ptr gguf(gguf_init_from_file(path.c_str(), { /*no_alloc=*/true, /*ctx=*/&raw }));
    const ggml_context_ptr shapes(raw);
    if (!gguf || !shapes) {
        throw std::invalid_argument(path + " is not a GGUF file, or is cut off");
    }
    oa_file_outline found{ oa_gguf_text(gguf.get(), "general.architecture"), oa_gguf_parts(gguf.get()), {} };
    for (int64_t i = 0; i < gguf_get_n_tensors(gguf.get()); ++i) {
        const char *        name   = gguf_get_tensor_name(gguf.get(), i);
        const ggml_tensor * tensor = ggml_get_tensor(shapes.get(), name);
        found.tensors.push_back({ name,
                                  { tensor->ne, tensor->ne + ggml_n_dims(tensor) },
                                  gguf_get_data_offset(gguf.get()) + gguf_get_tensor_offset(gguf.get(), i),
                                  gguf_get_tensor_size(gguf.get(), i) });
    }
    return found;
}
