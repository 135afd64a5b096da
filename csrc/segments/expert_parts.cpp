#include "expert_parts.h"

#include "ggml-backend.h"
#include "model_experts.h"
#include "parts.h"
#include "tensor_flags.h"

#include <cstring>
#include <numeric>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

constexpr auto mapped_file = "CPU_Mapped";

// Numbers of all experts among those of a side.
using numbers = std::vector<int32_t>;

[[noreturn]] void refuse(const ggml_tensor & weight, const std::string & why) {
    throw std::runtime_error("backend map: '" + std::string(weight.name) + "' " + why);
}

// What others than `experts` have is the number of nothing.
numbers on_device(const std::vector<int32_t> & experts, int64_t n_experts, int32_t nothing) {
    numbers found(n_experts, nothing);
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

numbers in_order(int64_t n_experts) {
    numbers found(n_experts);
    std::iota(found.begin(), found.end(), 0);
    return found;
}

// The numbers of a load's weights, until there is memory for their tables; weights with slots.
struct waiting {
    const ggml_tensor * weight;
    numbers             device, host;
};

thread_local std::weak_ptr<oa_model_experts> t_model;
thread_local std::vector<waiting>            t_waiting;
thread_local std::vector<ggml_tensor *>      t_with_slots;

ggml_tensor table_of(int64_t n_experts, int64_t n_layers) {
    ggml_tensor table = {};
    table.type        = GGML_TYPE_I32;
    for (int i = 0; i < GGML_MAX_DIMS; ++i) {
        table.ne[i] = i == 1 ? n_experts : i == 2 ? n_layers : 1;
        table.nb[i] = i <= 1 ? sizeof(int32_t) : table.nb[i - 1] * size_t(table.ne[i - 1]);
    }
    return table;
}

// Of several layers, of which an operator reads one.
ggml_tensor * create_table(const ggml_tensor & weight, int64_t n_experts, int64_t n_layers, ggml_backend_dev_t device,
                           const oa_segment_context & context) {
    const ggml_tensor table = table_of(n_experts, n_layers);
    ggml_tensor *     made  = ggml_dup_tensor(context(table_of(n_experts, 1), device, GGML_OP_GET_ROWS), &table);
    ggml_format_name(made, "%s (numbers, %s)", weight.name, device ? ggml_backend_dev_name(device) : "host");
    made->flags |= OA_TENSOR_FLAG_MAPPED;
    return made;
}

// What no number leads to is zero. A faster layout takes a part as a whole.
void fill_part(const ggml_tensor & weight, ggml_tensor * part, const numbers & number_of, int32_t elsewhere) {
    const size_t      nbytes = weight.nb[oa_experts_axis(&weight)];
    std::vector<char> bytes(ggml_nbytes(part));
    for (size_t e = 0; e < number_of.size(); ++e) {
        if (number_of[e] != elsewhere) {
            std::memcpy(&bytes[number_of[e] * nbytes], static_cast<const char *>(weight.data) + e * nbytes, nbytes);
        }
    }
    ggml_backend_tensor_set(part, bytes.data(), 0, bytes.size());
}

void fill_table(ggml_tensor * table, const numbers & number_of, int64_t row = 0) {
    ggml_backend_tensor_set(table, number_of.data(), size_t(row) * table->nb[2], number_of.size() * sizeof(int32_t));
}

// ---- experts that stay --------------------------------------------------------------------------------------------

void add_some(ggml_tensor * weight, const oa_segment & segment, oa_expert_layer & layer, ggml_tensor * here,
              const oa_segment_context & context) {
    const std::vector<int32_t> & experts = segment.part.experts;
    const int64_t                all     = weight->ne[oa_experts_axis(weight)];
    ggml_tensor * const          there   = create_table(*weight, all, 1, segment.device, context);
    ggml_tensor * const          own     = create_table(*weight, all, 1, nullptr, context);
    oa_expert_tables_set(weight, there, own);
    oa_expert_layer::set(own, weight->ne[oa_experts_axis(weight)] == layer.n_experts ? &layer : nullptr);
    t_waiting.push_back(
        { weight, on_device(experts, all, int32_t(experts.size())), on_host(experts, all, here != nullptr) });
}

void fill_some(const waiting & filled) {
    const ggml_tensor & weight = *filled.weight;
    ggml_tensor * const there  = oa_segment_part(&weight, 0);
    fill_part(weight, there, filled.device, int32_t(there->ne[oa_experts_axis(&weight)] - 1));
    if (ggml_tensor * const here = oa_segment_part(&weight, 1)) {
        fill_part(weight, here, filled.host, -1);
    }
    fill_table(oa_expert_table(&weight, 0), filled.device);
    fill_table(oa_expert_table(&weight, 1), filled.host);
}

// ---- experts that change ------------------------------------------------------------------------------------------

oa_layer_slots & create_slots(const ggml_tensor & weight, const oa_segment & segment, oa_expert_layer & layer,
                              const oa_segment_context & context) {
    const int64_t  all   = layer.n_experts;
    ggml_tensor *& table = t_model.lock()->table(segment.device);
    if (!table) {
        table = create_table(weight, all, segment.n_slot_layers, segment.device, context);
    }
    if (table->ne[1] != all) {
        refuse(weight, "has slots, and a layer with another number of experts has some, too");
    }
    const oa_model_experts & model = *t_model.lock();
    layer.slots                    = std::make_unique<oa_layer_slots>();
    oa_layer_slots & slots         = *layer.slots;
    slots.device                   = segment.device;
    slots.device_table             = table;
    slots.host_table               = create_table(weight, all, 1, nullptr, context);
    slots.first                    = segment.part.experts;
    slots.uploads                  = segment.uploads;
    slots.slots.resize(size_t(segment.part.slots));
    for (size_t i = 0; i < slots.first.size(); ++i) {
        slots.slots[i].expert = slots.first[i];
    }
    for (const oa_expert_layer & other : model.layers()) {
        slots.row += &other != &layer && other.slots && other.slots->device == slots.device;
    }
    oa_expert_layer::set(slots.host_table, &layer);
    return slots;
}

void add_slots(ggml_tensor * weight, const oa_segment & segment, oa_expert_layer & layer,
               const oa_segment_context & context) {
    if (weight->ne[oa_experts_axis(weight)] != layer.n_experts) {
        refuse(*weight, "has slots, and another number of experts than another weight of its layer");
    }
    oa_layer_slots & slots = layer.slots ? *layer.slots : create_slots(*weight, segment, layer, context);
    if (slots.device != segment.device || slots.slots.size() != size_t(segment.part.slots) ||
        slots.first != segment.part.experts) {
        refuse(*weight, "has other slots than another weight of its layer");
    }
    slots.weights.push_back({ weight, oa_segment_part(weight, 0) });
    oa_expert_tables_set(weight, slots.device_table, slots.host_table);
    t_with_slots.push_back(weight);
}

void fill_slots(ggml_tensor * weight) {
    const oa_expert_layer & layer   = *oa_expert_layer::of(weight);
    const oa_layer_slots &  slots   = *layer.slots;
    const auto              nothing = int32_t(slots.slots.size());
    const numbers           there   = on_device(slots.first, layer.n_experts, nothing);
    fill_part(*weight, oa_segment_part(weight, 0), there, nothing);
    if (ggml_tensor * const here = oa_segment_part(weight, 1)) {
        fill_part(*weight, here, in_order(layer.n_experts), -1);
    }
    fill_table(slots.device_table, there, slots.row);
    fill_table(slots.host_table, on_host(slots.first, layer.n_experts, false));
    // A weight in memory of its own is uploaded from there.
    if (!(weight->flags & OA_TENSOR_FLAG_STREAM) &&
        std::string(ggml_backend_buffer_name(weight->buffer)) != mapped_file) {
        OA_STREAM_FILE(weight) = 0;
    }
}

} // namespace

std::shared_ptr<void> oa_expert_parts_begin(const llama_model * model) {
    t_waiting.clear();
    t_with_slots.clear();
    auto made = std::make_shared<oa_model_experts>(model);
    t_model   = made;
    return made;
}

void oa_expert_parts_add(ggml_tensor * weight, const oa_segment & segment, const oa_segment_context & context) {
    const int           axis    = oa_experts_axis(weight);
    const int64_t       all     = weight->ne[axis];
    const oa_division & part    = segment.part;
    const int           number  = oa_layer_of(weight->name);
    const bool          is_bias = axis == 1;
    if (number < 0 || weight->ne[3] != 1 || (is_bias && std::strstr(weight->name, "_exps.bias") == nullptr)) {
        refuse(*weight, "has no experts; it cannot be divided by them");
    }
    if (part.slots >= all) {
        refuse(*weight, "has " + std::to_string(all) + " experts; it has slots for fewer, or none");
    }
    if (int64_t(part.experts.size()) >= all || (!part.experts.empty() && part.experts.back() >= all)) {
        refuse(*weight, "has " + std::to_string(all) + " experts; the segment's are not some of them");
    }
    const ggml_op     op        = is_bias ? GGML_OP_ADD_ID : GGML_OP_MUL_MAT_ID;
    const ggml_tensor there     = oa_part_of(*weight, axis, part.count + 1);
    const ggml_tensor here      = oa_part_of(*weight, axis, part.slots ? all : all - part.count);
    ggml_context *    there_ctx = context(there, segment.device, op);
    ggml_context *    here_ctx  = context(here, nullptr, op);
    oa_segment_part_set(weight, 0, oa_create_part(*weight, there, ggml_backend_dev_name(segment.device), there_ctx));
    oa_segment_part_set(weight, 1, here_ctx ? oa_create_part(*weight, here, "host", here_ctx) : nullptr);
    oa_expert_layer & layer = t_model.lock()->layer(number, all, segment.device);
    if (part.slots) {
        add_slots(weight, segment, layer, context);
    } else {
        add_some(weight, segment, layer, oa_segment_part(weight, 1), context);
    }
}

void oa_expert_parts_fill() {
    for (const waiting & filled : t_waiting) {
        fill_some(filled);
    }
    for (ggml_tensor * weight : t_with_slots) {
        fill_slots(weight);
    }
    t_waiting.clear();
    t_with_slots.clear();
    if (const auto model = t_model.lock()) {
        model->start();
    }
}
