#include "segments.h"

#include "expert_parts.h"
#include "ggml-backend.h"
#include "graph_rewrite.h"
#include "parts.h"
#include "tensor_flags.h"

#include <stdexcept>
#include <string>
#include <vector>

namespace {

thread_local std::vector<ggml_tensor *> t_divided; // by values, in the load in progress

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

void add_values(ggml_tensor * weight, const oa_segment & segment, const oa_segment_context & context) {
    const int     axis  = segment.part.axis == oa_segment_axis::columns ? 0 : 1;
    const int64_t step  = axis == 0 ? ggml_blck_size(weight->type) : 1;
    const int64_t whole = weight->ne[axis], count = segment.part.count;
    if (count >= whole || count % step != 0 || weight->ne[3] != 1) {
        throw std::runtime_error("backend map: '" + std::string(weight->name) + "' has " + std::to_string(whole) +
                                 (axis == 0 ? " columns in blocks of " + std::to_string(step) : " rows") +
                                 "; its first " + std::to_string(count) + " cannot be a segment");
    }
    const ggml_op     op          = weight->ne[2] > 1 ? GGML_OP_MUL_MAT_ID : GGML_OP_MUL_MAT;
    const ggml_tensor device_part = oa_part_of(*weight, axis, count);
    const ggml_tensor host_part   = oa_part_of(*weight, axis, whole - count);
    ggml_context *    host_ctx    = context(host_part, nullptr, op);
    ggml_tensor *     on_device   = oa_create_part(*weight, device_part, ggml_backend_dev_name(segment.device),
                                                   context(device_part, segment.device, op));
    oa_segment_part_set(weight, 0, on_device);
    oa_segment_part_set(weight, 1, host_ctx ? oa_create_part(*weight, host_part, "host", host_ctx) : nullptr);
}

} // namespace

std::shared_ptr<void> oa_segments_begin(const llama_model * model) {
    t_divided.clear();
    return oa_expert_parts_begin(model);
}

void oa_segments_add(ggml_tensor * weight, const oa_segment & segment, const oa_segment_context & context) {
    if (segment.part.axis == oa_segment_axis::experts) {
        oa_expert_parts_add(weight, segment, context);
    } else {
        add_values(weight, segment, context);
        t_divided.push_back(weight);
    }
    weight->flags |= OA_TENSOR_FLAG_DIVIDED;
    OA_SEGMENT_AXIS(weight)  = int32_t(segment.part.axis);
    OA_SEGMENT_COUNT(weight) = int32_t(segment.part.count);
}

void oa_segments_fill() {
    for (const ggml_tensor * weight : t_divided) {
        copy_part(*weight, 0, oa_segment_part(weight, 0));
        if (ggml_tensor * host = oa_segment_part(weight, 1)) {
            copy_part(*weight, OA_SEGMENT_COUNT(weight), host);
        }
    }
    t_divided.clear();
    oa_expert_parts_fill();
}

uint32_t oa_segments_more_nodes(const std::vector<std::pair<std::string, ggml_tensor *>> & weights, uint32_t n_used) {
    uint32_t found = 0;
    for (const auto & [name, weight] : weights) {
        // Of a block's two or three matrices: views and additions of each choice on both sides, and all else.
        found += oa_is_divided(weight, oa_segment_axis::experts) && weight->ne[2] > 1 ? 2 * n_used + 24 : 0;
    }
    return found;
}

void oa_segments_divide(ggml_context * ctx, ggml_cgraph * graph) {
    oa_divide_values(ctx, graph);
    oa_divide_experts(ctx, graph);
}
