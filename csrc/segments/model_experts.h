// The layers of a model whose experts are divided between two devices, from its load to its end: how often they were
// used, and the slots of those that change. Hooks: patch 0013.
#pragma once

#include "expert_layer.h"
#include "expert_slots.h"
#include "llama.h"

#include <atomic>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

class oa_model_experts {
  public:
    explicit oa_model_experts(const llama_model * model) : model_(model) {}
    ~oa_model_experts();

    oa_model_experts(const oa_model_experts &)             = delete;
    oa_model_experts & operator=(const oa_model_experts &) = delete;

    // The layer of this number, of which there is one.
    oa_expert_layer & layer(int number, int64_t n_experts, ggml_backend_dev_t device);

    // Tables [1, experts, layers] of the layers with slots, by device.
    ggml_tensor *& table(ggml_backend_dev_t device) { return tables_[device]; }

    // The weights are loaded.
    void start();

    const std::deque<oa_expert_layer> & layers() const { return layers_; }

    oa_expert_slots * slots() { return slots_.get(); }

  private:
    const llama_model *                         model_;
    std::deque<oa_expert_layer>                 layers_;
    std::map<ggml_backend_dev_t, ggml_tensor *> tables_;
    std::unique_ptr<oa_expert_slots>            slots_;
};

// Models that have slots in this process.
LLAMA_API extern std::atomic<int> oa_models_with_slots;

// The rest of the two functions below.
LLAMA_API bool oa_model_slots_step(const llama_model * model, ggml_backend_sched_t sched, int64_t n_tokens);
LLAMA_API void oa_model_slots_idle(const llama_model * model, ggml_backend_sched_t sched);

// A context of the model computes a graph of so many tokens now. false: it must not, for an upload of experts failed
// (oa_stream_take_error says why).
inline bool oa_experts_step(const llama_model & model, ggml_backend_sched_t sched, int64_t n_tokens) {
    return oa_models_with_slots.load(std::memory_order_relaxed) == 0 || oa_model_slots_step(&model, sched, n_tokens);
}

// The context has finished all graphs.
inline void oa_experts_idle(const llama_model & model, ggml_backend_sched_t sched) {
    if (oa_models_with_slots.load(std::memory_order_relaxed) != 0) {
        oa_model_slots_idle(&model, sched);
    }
}

// What was counted of each layer with divided experts since the model was loaded, in decode (oa_decode_tokens).
struct oa_expert_counts {
    int     layer;
    int64_t uses, hits, uploads, uploaded_nbytes;
};
LLAMA_API std::vector<oa_expert_counts> oa_expert_counts_of(const llama_model * model);

// For tests: random delays of up to so many microseconds around each upload; uploads until one fails, -1 for none;
// tables that change before the upload ends; random experts instead of the policy's.
LLAMA_API void oa_set_slots_seam(int delay_us, int fails_in, bool unordered, bool at_random);
