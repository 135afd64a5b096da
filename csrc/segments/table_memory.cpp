#include "table_memory.h"

#include "ggml-backend-impl.h"

namespace {

// A load knows types of memory by their names.
const char * name(ggml_backend_buffer_type_t) {
    return "CPU_Tables";
}

ggml_backend_buffer_type table_type() {
    ggml_backend_buffer_type type = *ggml_backend_cpu_buffer_type();
    type.iface.get_name           = name;
    return type;
}

} // namespace

ggml_backend_buffer_type_t oa_segments_table_buft() {
    static ggml_backend_buffer_type type = table_type();
    return &type;
}
