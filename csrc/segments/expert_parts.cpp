#include "expert_parts.h"

#include "ggml-backend.h"
#include "parts.h"
#include "tensor_flags.h"

#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

bool is_bias(const ggml_tensor & weight) {
    return weight.ne[2] == 1;
}

int axis_of(const ggml_tensor & weight) {
    return is_bias(weight) ? 1 : 2;
}

[[noreturn]] void refuse(const ggml_tensor & weight, int64_t n_experts) {
    throw std::runtime_error("backend map: '" + std::string(weight.name) + "' has " + std::to_string(n_experts) +
                             " experts; the segment's are not some of them");
}

// Numbers of all experts among those of a side.
using numbers = std::vector<int32_t>;

numbers on_device(const std::vector<int32_t> & experts, int64_t n_experts) {
    numbers found(n_experts, int32_t(experts.size()));
    for (size_t i = 0; i < experts.size(); ++i) {
        found[experts[i]] = int32_t(i);
    }
    return found;
}

numbers on_host(const std::vector<int32_t> & experts, int64_t n_experts, bool has_copy) {
    numbers found(n_experts);
    for (int32_t e = 0, next = 0, i = 0; e < n_experts; ++e) {
        const bool elsewhere = size_t(i) < experts.size() && experts[i] == e;
        found[e]             = elsewhere ? -1 : has_copy ? next : e;
        i += elsewhere, next += !elsewhere;
    }
    return found;
}

// The numbers of a load's weights, until there is memory for their tables.
struct waiting {
    const ggml_tensor * weight;
    numbers             device, host;
};

thread_local std::vector<waiting> t_waiting;

ggml_tensor * create_table(const ggml_tensor & weight, int64_t n_experts, const char * where, ggml_context * ctx) {
    ggml_tensor * table = ggml_new_tensor_2d(ctx, GGML_TYPE_I32, 1, n_experts);
    ggml_format_name(table, "%s (numbers, %s)", weight.name, where);
    table->flags |= OA_TENSOR_FLAG_MAPPED;
    return table;
}

ggml_tensor table_of(int64_t n_experts) {
    ggml_tensor table = {};
    table.type        = GGML_TYPE_I32;
    for (int i = 0; i < GGML_MAX_DIMS; ++i) {
        table.ne[i] = i == 1 ? n_experts : 1;
        table.nb[i] = i <= 1 ? sizeof(int32_t) : sizeof(int32_t) * n_experts;
    }
    return table;
}

// What no number leads to is zero. A faster layout takes a part as a whole.
void fill_part(const ggml_tensor & weight, ggml_tensor * part, const numbers & number_of, int32_t elsewhere) {
    const size_t      nbytes = weight.nb[axis_of(weight)];
    std::vector<char> bytes(ggml_nbytes(part));
    for (size_t e = 0; e < number_of.size(); ++e) {
        if (number_of[e] != elsewhere) {
            std::memcpy(&bytes[number_of[e] * nbytes], static_cast<const char *>(weight.data) + e * nbytes, nbytes);
        }
    }
    ggml_backend_tensor_set(part, bytes.data(), 0, bytes.size());
}

void fill_table(ggml_tensor * table, const numbers & number_of) {
    ggml_backend_tensor_set(table, number_of.data(), 0, number_of.size() * sizeof(int32_t));
}

} // namespace

void oa_expert_parts_begin() {
    t_waiting.clear();
}

void oa_expert_parts_add(ggml_tensor * weight, const oa_segment & segment, const oa_segment_context & context) {
    const std::vector<int32_t> & experts = segment.part.experts;
    const int                    axis    = axis_of(*weight);
    const int64_t                all = weight->ne[axis], k = int64_t(experts.size());
    if (k >= all || experts.back() >= all || weight->ne[3] != 1) {
        refuse(*weight, all);
    }
    const ggml_op      op        = is_bias(*weight) ? GGML_OP_ADD_ID : GGML_OP_MUL_MAT_ID;
    const char * const device    = ggml_backend_dev_name(segment.device);
    const ggml_tensor  there     = oa_part_of(*weight, axis, k + 1);
    const ggml_tensor  here      = oa_part_of(*weight, axis, all - k);
    const ggml_tensor  table     = table_of(all);
    ggml_context *     there_ctx = context(there, segment.device, op);
    ggml_context *     here_ctx  = context(here, nullptr, op);
    oa_segment_part_set(weight, 0, oa_create_part(*weight, there, device, there_ctx));
    oa_segment_part_set(weight, 1, here_ctx ? oa_create_part(*weight, here, "host", here_ctx) : nullptr);
    oa_expert_tables_set(weight, create_table(*weight, all, device, context(table, segment.device, GGML_OP_GET_ROWS)),
                         create_table(*weight, all, "host", context(table, nullptr, GGML_OP_GET_ROWS)));
    t_waiting.push_back({ weight, on_device(experts, all), on_host(experts, all, here_ctx) });
}

void oa_expert_parts_fill() {
    for (const auto & [weight, device, host] : t_waiting) {
        ggml_tensor * const there = oa_segment_part(weight, 0);
        fill_part(*weight, there, device, int32_t(there->ne[axis_of(*weight)] - 1));
        if (ggml_tensor * const here = oa_segment_part(weight, 1)) {
            fill_part(*weight, here, host, -1);
        }
        fill_table(oa_expert_table(weight, 0), device);
        fill_table(oa_expert_table(weight, 1), host);
    }
    t_waiting.clear();
}
