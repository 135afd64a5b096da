#include "placeholder.h"

#include <map>

namespace {

// Not null and not small: ggml's allocators take null for "not allocated".
void * const nowhere = reinterpret_cast<void *>(uintptr_t(1) << 44);

ggml_backend_buffer_type_t real_of(ggml_backend_buffer_type_t buft) {
    return static_cast<ggml_backend_buffer_type_t>(buft->context);
}

// ---- buffers -------------------------------------------------------------------------------------------------------

void free_buffer(ggml_backend_buffer_t) {}

void * get_base(ggml_backend_buffer_t) {
    return nowhere;
}

void memset_tensor(ggml_backend_buffer_t, ggml_tensor *, uint8_t, size_t, size_t) {}

void set_tensor(ggml_backend_buffer_t, ggml_tensor *, const void *, size_t, size_t) {}

void get_tensor(ggml_backend_buffer_t, const ggml_tensor *, void *, size_t, size_t) {}

void set_tensor_2d(ggml_backend_buffer_t, ggml_tensor *, const void *, size_t, size_t, size_t, size_t, size_t) {}

void get_tensor_2d(ggml_backend_buffer_t, const ggml_tensor *, void *, size_t, size_t, size_t, size_t, size_t) {}

bool cpy_tensor(ggml_backend_buffer_t, const ggml_tensor *, ggml_tensor *) {
    return true;
}

void clear(ggml_backend_buffer_t, uint8_t) {}

constexpr ggml_backend_buffer_i buffer_interface = {
    free_buffer,   get_base,      nullptr,    memset_tensor, set_tensor, get_tensor,
    set_tensor_2d, get_tensor_2d, cpy_tensor, clear,         nullptr,
};

const char * buft_name(ggml_backend_buffer_type_t) {
    return "elsewhere";
}

ggml_backend_buffer_t alloc_buffer(ggml_backend_buffer_type_t buft, size_t size) {
    return ggml_backend_buffer_init(buft, buffer_interface, nullptr, size);
}

size_t get_alignment(ggml_backend_buffer_type_t buft) {
    return ggml_backend_buft_get_alignment(real_of(buft));
}

size_t get_max_size(ggml_backend_buffer_type_t buft) {
    return ggml_backend_buft_get_max_size(real_of(buft));
}

size_t get_alloc_size(ggml_backend_buffer_type_t buft, const ggml_tensor * tensor) {
    return ggml_backend_buft_get_alloc_size(real_of(buft), tensor);
}

constexpr ggml_backend_buffer_type_i buft_interface = {
    buft_name, alloc_buffer, get_alignment, get_max_size, get_alloc_size, nullptr,
};

// ---- backend -------------------------------------------------------------------------------------------------------

const char * backend_name(ggml_backend_t backend) {
    return ggml_backend_dev_name(backend->device);
}

void free_backend(ggml_backend_t backend) {
    delete backend;
}

ggml_status graph_compute(ggml_backend_t, ggml_cgraph *) {
    return GGML_STATUS_SUCCESS;
}

ggml_guid_t backend_guid() {
    static ggml_guid guid = { 0x6f, 0x61, 0x72, 0x61, 0x6e, 0x6b, 0x00, 0x01,
                              0x9e, 0x3c, 0x51, 0x0b, 0x77, 0x2d, 0xc4, 0x18 };
    return &guid;
}

} // namespace

ggml_backend_buffer_type_t oa_placeholder_buffer_type(ggml_backend_dev_t dev, ggml_backend_buffer_type_t real) {
    static std::map<ggml_backend_dev_t, ggml_backend_buffer_type> types;
    const auto it = types.try_emplace(dev, ggml_backend_buffer_type{ buft_interface, dev, real }).first;
    return &it->second;
}

ggml_backend_t oa_placeholder_backend(ggml_backend_dev_t dev) {
    auto * backend               = new ggml_backend{};
    backend->guid                = backend_guid();
    backend->iface.get_name      = backend_name;
    backend->iface.free          = free_backend;
    backend->iface.graph_compute = graph_compute;
    backend->device              = dev;
    return backend;
}
