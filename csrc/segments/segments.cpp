#include "segments.h"

#include "ggml-backend.h"
#include "ggml-cpp.h"
#include "tensor_flags.h"

#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

thread_local std::vector<ggml_tensor *> t_divided; // of the load in progress

// A part's shape, of the weight's type; it owns no memory.
ggml_tensor part_of(const ggml_tensor & weight, int axis, int64_t count) {
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

ggml_tensor * create(const ggml_tensor & weight, const ggml_tensor & part, const char * where, ggml_context * ctx) {
    ggml_tensor * tensor = ggml_dup_tensor(ctx, &part);
    ggml_format_name(tensor, "%s (%s)", weight.name, where);
    tensor->flags |= OA_TENSOR_FLAG_MAPPED;
    return tensor;
}

void copy_part(const ggml_tensor & weight, int64_t first, ggml_tensor * part) {
    const int            axis   = OA_SEGMENT_AXIS(&weight);
    const size_t         offset = axis == 0 ? ggml_row_size(weight.type, first) : first * weight.nb[1];
    const int64_t        n_rows = axis == 0 ? weight.ne[1] : 1;
    const size_t         length = axis == 0 ? part->nb[1] : part->nb[2];
    std::vector<uint8_t> bytes(ggml_nbytes(part));
    uint8_t *            to = bytes.data();
    for (int64_t i = 0; i < weight.ne[2]; ++i) {
        for (int64_t row = 0; row < n_rows; ++row, to += length) {
            std::memcpy(to, (const uint8_t *) weight.data + offset + i * weight.nb[2] + row * weight.nb[1], length);
        }
    }
    ggml_backend_tensor_set(part, bytes.data(), 0, bytes.size());
}

} // namespace

void oa_segments_begin() {
    t_divided.clear();
}

void oa_segments_add(ggml_tensor * weight, const oa_segment & segment, const oa_segment_context & context) {
    const int     axis  = segment.columns ? 0 : 1;
    const int64_t step  = segment.columns ? ggml_blck_size(weight->type) : 1;
    const int64_t whole = weight->ne[axis];
    if (segment.count <= 0 || segment.count >= whole || segment.count % step != 0 || weight->ne[3] != 1) {
        throw std::runtime_error("backend map: '" + std::string(weight->name) + "' has " + std::to_string(whole) +
                                 (axis == 0 ? " columns in blocks of " + std::to_string(step) : " rows") +
                                 "; its first " + std::to_string(segment.count) + " cannot be a segment");
    }
    const ggml_tensor device_part = part_of(*weight, axis, segment.count);
    const ggml_tensor host_part   = part_of(*weight, axis, whole - segment.count);
    ggml_tensor *     on_device =
        create(*weight, device_part, ggml_backend_dev_name(segment.device), context(device_part, segment.device));
    ggml_context * host_ctx = context(host_part, nullptr);

    weight->flags |= OA_TENSOR_FLAG_DIVIDED;
    OA_SEGMENT_AXIS(weight)  = axis;
    OA_SEGMENT_COUNT(weight) = int32_t(segment.count);
    oa_segment_part_set(weight, 0, on_device);
    oa_segment_part_set(weight, 1, host_ctx ? create(*weight, host_part, "host", host_ctx) : nullptr);
    t_divided.push_back(weight);
}

void oa_segments_fill() {
    for (const ggml_tensor * weight : t_divided) {
        copy_part(*weight, 0, oa_segment_part(weight, 0));
        if (ggml_tensor * host = oa_segment_part(weight, 1)) {
            copy_part(*weight, OA_SEGMENT_COUNT(weight), host);
        }
    }
    t_divided.clear();
}
