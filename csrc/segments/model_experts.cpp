#include "model_experts.h"

#include "expert_totals.h"
#include "weight_stream.h"

#include <algorithm>
#include <mutex>

std::atomic<int> oa_models_with_slots{ 0 };

namespace {

std::mutex                                        g_mutex;
std::map<const llama_model *, oa_model_experts *> g_models;

oa_model_experts * find(const llama_model * model) {
    const std::lock_guard<std::mutex> lock(g_mutex);
    const auto                        it = g_models.find(model);
    return it == g_models.end() ? nullptr : it->second;
}

} // namespace

oa_model_experts::~oa_model_experts() {
    oa_models_with_slots -= slots_ != nullptr;
    const std::lock_guard<std::mutex> lock(g_mutex);
    const auto                        it = g_models.find(model_);
    if (it != g_models.end() && it->second == this) {
        g_models.erase(it);
    }
}

oa_expert_layer & oa_model_experts::layer(int number, int64_t n_experts, ggml_backend_dev_t device) {
    const auto it =
        std::find_if(layers_.begin(), layers_.end(), [&](const auto & layer) { return layer.number == number; });
    if (it != layers_.end()) {
        return *it;
    }
    const std::lock_guard<std::mutex> lock(g_mutex);
    g_models[model_] = this;
    return layers_.emplace_back(number, n_experts, device);
}

void oa_model_experts::start() {
    if (std::any_of(layers_.begin(), layers_.end(), [](const auto & layer) { return layer.slots != nullptr; })) {
        slots_ = std::make_unique<oa_expert_slots>(layers_);
        ++oa_models_with_slots;
    }
}

bool oa_model_slots_step(const llama_model * model, ggml_backend_sched_t sched, int64_t n_tokens) {
    oa_model_experts * const experts = find(model);
    if (!experts || !experts->slots()) {
        return true;
    }
    const std::string error = experts->slots()->step(sched, n_tokens);
    if (!error.empty()) {
        oa_stream_fail(error);
    }
    return error.empty();
}

void oa_model_slots_idle(const llama_model * model, ggml_backend_sched_t sched) {
    oa_model_experts * const experts = find(model);
    if (experts && experts->slots()) {
        experts->slots()->idle(sched);
    }
}

std::vector<oa_expert_counts> oa_expert_counts_of(const llama_model * model) {
    std::vector<oa_expert_counts>     counts;
    const std::lock_guard<std::mutex> lock(g_mutex);
    const auto                        it = g_models.find(model);
    if (it != g_models.end()) {
        for (const oa_expert_layer & layer : it->second->layers()) {
            counts.push_back({ layer.number, layer.uses, layer.hits, layer.uploads, layer.uploaded_nbytes });
        }
    }
    return counts;
}

std::vector<oa_expert_totals> oa_expert_totals_by_device() {
    std::map<std::string, oa_expert_totals> totals;
    const std::lock_guard<std::mutex>       lock(g_mutex);
    for (const auto & [model, experts] : g_models) {
        for (const oa_expert_layer & layer : experts->layers()) {
            const char * const device    = ggml_backend_dev_name(layer.device);
            oa_expert_totals & of_device = totals[device];
            of_device.device             = device;
            of_device.uses += layer.uses;
            of_device.hits += layer.hits;
            of_device.uploads += layer.uploads;
            of_device.uploaded_nbytes += layer.uploaded_nbytes;
        }
    }
    std::vector<oa_expert_totals> found;
    for (const auto & [device, of_device] : totals) {
        found.push_back(of_device);
    }
    return found;
}

void oa_set_slots_seam(int delay_us, int fails_in, bool unordered, bool at_random) {
    oa_slot_seam & seam = oa_slots_seam();
    seam.delay_us       = delay_us;
    seam.fails_in       = fails_in;
    seam.unordered      = unordered;
    seam.at_random      = at_random;
}
