// A layer whose experts are divided: what its graphs note while they run, and what its slots hold, if it has some.
#pragma once

#include "ggml-backend.h"
#include "slot_policy.h"
#include "tensor_flags.h"

#include <atomic>
#include <cstring>
#include <memory>
#include <mutex>
#include <vector>

// Batches of more tokens are no decode: their choices are not counted, and change nothing in slots.
constexpr int64_t oa_decode_tokens = 8;

// Experts on the accelerator that change. The tables are read by every graph, the rest by expert_slots.cpp alone.
struct oa_layer_slots {
    struct weight_part {
        const ggml_tensor * weight; // on the host, all experts
        ggml_tensor *       part;   // on the accelerator: a slot for each of some, and zeros
    };

    ggml_backend_dev_t       device = nullptr;
    std::vector<weight_part> weights;
    ggml_tensor *            device_table = nullptr; // of all layers with slots on the device
    int64_t                  row          = 0;       // this layer's in it
    ggml_tensor *            host_table   = nullptr;
    std::vector<int32_t>     first;       // experts that are there at the beginning
    int                      uploads = 1; // at once, at most
    std::vector<oa_slot>     slots;
};

// Dimension of a weight's experts, or of their biases'.
inline int oa_experts_axis(const ggml_tensor * weight) {
    return weight->ne[2] > 1 ? 2 : 1;
}

class oa_expert_layer {
  public:
    oa_expert_layer(int number, int64_t n_experts, ggml_backend_dev_t device) :
        number(number), n_experts(n_experts), device(device) {}

    const int                       number; // of the model's
    const int64_t                   n_experts;
    const ggml_backend_dev_t        device; // that has some of them
    std::unique_ptr<oa_layer_slots> slots;  // null: its experts are the same all the time

    // Of batches of up to oa_decode_tokens tokens, since the model was loaded.
    std::atomic<int64_t> uses{ 0 }, hits{ 0 }, uploads{ 0 }, uploaded_nbytes{ 0 };

    // The layer of a weight divided by experts; null: its experts are not those that the layer's router chooses.
    static oa_expert_layer * of(const ggml_tensor * weight) {
        oa_expert_layer * layer;
        std::memcpy(&layer, oa_expert_table(weight, 1)->op_params + 12, sizeof(layer));
        return layer;
    }
    static void set(ggml_tensor * host_table, oa_expert_layer * layer) {
        std::memcpy(host_table->op_params + 12, &layer, sizeof(layer));
    }

    // Whether the weight's experts change.
    static bool has_slots(const ggml_tensor * weight) {
        const oa_expert_layer * layer = of(weight);
        return layer && layer->slots && layer->slots->host_table == oa_expert_table(weight, 1);
    }

    // Choices [n_tokens, n_used] of a batch that is computed now, of which n_hits are the accelerator's.
    void note(const std::vector<int32_t> & ids, int64_t n_used, int64_t n_hits);

    // What was noted since the last call, if the layer has slots: ids of tokens one behind the other, n_used each.
    std::vector<int32_t> take_noted(int64_t & n_used);

  private:
    std::mutex           mutex_;
    std::vector<int32_t> noted_;
    int64_t              n_used_ = 0;
};

// An operator of the host: a layer's choices as numbers among the host's experts, by the table [1, experts]; -1 for the
// accelerator's. layer: notes the choices; null in a prompt's graph. i32 [used, tokens], as `ids`.
ggml_tensor * oa_host_numbers(ggml_context * ctx, ggml_tensor * table, ggml_tensor * ids, oa_expert_layer * layer);
