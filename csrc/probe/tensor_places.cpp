#include "tensor_places.h"

#include "ggml.h"
#include "gguf.h"

#include <memory>
#include <stdexcept>

namespace {

struct gguf_deleter {
    void operator()(gguf_context * context) const { gguf_free(context); }
};
struct ggml_deleter {
    void operator()(ggml_context * context) const { ggml_free(context); }
};

int n_parts_of(const gguf_context * gguf) {
    const int64_t id = gguf_find_key(gguf, "split.count");
    return id >= 0 && gguf_get_kv_type(gguf, id) == GGUF_TYPE_UINT16 ? gguf_get_val_u16(gguf, id) : 1;
}

std::string arch_of(const gguf_context * gguf) {
    const int64_t id = gguf_find_key(gguf, "general.architecture");
    return id >= 0 && gguf_get_kv_type(gguf, id) == GGUF_TYPE_STRING ? gguf_get_val_str(gguf, id) : "";
}

} // namespace

oa_file_outline oa_tensor_places(const std::string & path) {
    ggml_context *                                    raw = nullptr;
    const std::unique_ptr<gguf_context, gguf_deleter> gguf(
        gguf_init_from_file(path.c_str(), { /*no_alloc=*/true, /*ctx=*/&raw }));
    const std::unique_ptr<ggml_context, ggml_deleter> shapes(raw);
    if (!gguf || !shapes) {
        throw std::invalid_argument(path + " is not a GGUF file, or is cut off");
    }
    oa_file_outline found{ arch_of(gguf.get()), n_parts_of(gguf.get()), {} };
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
