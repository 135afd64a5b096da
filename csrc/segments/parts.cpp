#include "parts.h"

#include "tensor_flags.h"

#include <cstdio>

int oa_layer_of(const std::string & name) {
    int layer = -1;
    return std::sscanf(name.c_str(), "blk.%d.", &layer) == 1 ? layer : -1;
}

ggml_tensor oa_part_of(const ggml_tensor & weight, int axis, int64_t count) {
    ggml_tensor part = {};
    part.type        = weight.type;
    std::memcpy(part.ne, weight.ne, sizeof(part.ne));
    part.ne[axis] = count;
    part.nb[0]    = ggml_type_size(part.type);
    part.nb[1]    = ggml_row_size(part.type, part.ne[0]);
    part.nb[2]    = part.nb[1] * part.ne[1];
    part.nb[3]    = part.nb[2] * part.ne[2];
    return part;
}

ggml_tensor * oa_create_part(const ggml_tensor & weight, const ggml_tensor & part, const char * where,
                             ggml_context * ctx) {
    ggml_tensor * tensor = ggml_dup_tensor(ctx, &part);
    ggml_format_name(tensor, "%s (%s)", weight.name, where);
    tensor->flags |= OA_TENSOR_FLAG_MAPPED;
    return tensor;
}
