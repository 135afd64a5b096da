#include "expert_slots.h"

#include <algorithm>
#include <queue>
#include <random>
#include <utility>

namespace {

// Of experts that a plan has in slots at the beginning: so many uses, just now. A guess: else the first tokens throw
// them out.
constexpr int first_uses = 8;

int32_t nothing(const oa_layer_slots & slots) {
    return int32_t(slots.slots.size());
}

} // namespace

oa_expert_slots::oa_expert_slots(std::deque<oa_expert_layer> & layers) {
    for (oa_expert_layer & layer : layers) {
        if (!layer.slots) {
            continue;
        }
        const oa_layer_slots & slots = *layer.slots;
        cached_layer           made{ &layer, oa_expert_uses(layer.n_experts), {}, {}, 0, false };
        made.numbers.assign(size_t(layer.n_experts), nothing(slots));
        for (int i = 0; i < first_uses && !slots.first.empty(); ++i) {
            made.uses.add(slots.first.data(), int64_t(slots.first.size()));
        }
        for (size_t slot = 0; slot < slots.first.size(); ++slot) {
            made.numbers[size_t(slots.first[slot])] = int32_t(slot);
        }
        most_ += size_t(slots.uploads);
        layers_.push_back(std::move(made));
    }
}

std::string oa_expert_slots::step(ggml_backend_sched_t sched, int64_t n_tokens) {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (cached_layer & layer : layers_) {
        learn(layer);
    }
    const bool alone = computing_.empty() || (computing_.size() == 1 && computing_.count(sched) > 0);
    if (alone && n_tokens <= oa_decode_tokens) {
        const std::string error = publish(copier_.take_done());
        if (!error.empty()) {
            return error;
        }
        std::vector<oa_slot_upload> chosen;
        choose(chosen);
        write_tables(sched);
        copier_.queue(chosen);
    }
    computing_.insert(sched);
    return "";
}

void oa_expert_slots::idle(ggml_backend_sched_t sched) {
    const std::lock_guard<std::mutex> lock(mutex_);
    computing_.erase(sched);
}

void oa_expert_slots::learn(cached_layer & layer) {
    int64_t              n_used = 0;
    std::vector<int32_t> noted  = layer.layer->take_noted(n_used);
    if (noted.empty()) {
        return;
    }
    for (auto token = noted.begin(); token != noted.end(); token += n_used) {
        layer.uses.add(&*token, n_used);
    }
    layer.fresh = std::move(noted);
}

// What has been uploaded enters the tables; a slot whose upload failed is empty.
std::string oa_expert_slots::publish(std::vector<oa_slot_upload> done) {
    std::string error;
    for (const oa_slot_upload & upload : done) {
        const auto at =
            std::find_if(layers_.begin(), layers_.end(), [&](const auto & l) { return l.layer == upload.layer; });
        oa_slot & slot = upload.layer->slots->slots[upload.slot];
        slot.locked    = false;
        --at->n_locked;
        if (upload.error.empty()) {
            show(*at, upload.expert, upload.slot);
        } else {
            slot.expert = -1;
            hide(*at, upload.expert);
            error = upload.error;
        }
    }
    return error;
}

// As many uploads as the link has finished in a step before: a slot that waits for the copier has nobody in it.
void oa_expert_slots::choose(std::vector<oa_slot_upload> & chosen) {
    const size_t n_waiting = copier_.n_waiting();
    window_ = n_waiting == 0 ? std::min(2 * window_, most_) : window_ > n_waiting ? window_ - n_waiting : 1;

    struct wish {
        oa_slot_change change;
        size_t         layer;

        bool operator<(const wish & other) const { return change.gain < other.change.gain; }
    };
    std::priority_queue<wish> wishes;
    const auto                ask = [&](size_t i) {
        if (const auto change = next_change(layers_[i])) {
            wishes.push({ *change, i });
        }
    };
    for (size_t i = 0; i < layers_.size(); ++i) {
        ask(i);
    }
    for (size_t room = window_ - std::min(window_, n_waiting); room > 0 && !wishes.empty(); --room) {
        const wish best = wishes.top();
        wishes.pop();
        take(layers_[best.layer], best.change, chosen);
        ask(best.layer);
    }
    for (cached_layer & layer : layers_) {
        layer.fresh.clear();
    }
}

std::optional<oa_slot_change> oa_expert_slots::next_change(const cached_layer & layer) {
    const oa_layer_slots & slots = *layer.layer->slots;
    if (layer.fresh.empty() || layer.n_locked >= size_t(slots.uploads)) {
        return std::nullopt;
    }
    if (!oa_slots_seam().at_random) {
        return oa_best_slot_change(layer.uses, slots.slots, layer.fresh, {});
    }
    thread_local std::minstd_rand random(1);
    const size_t                  slot   = random() % slots.slots.size();
    const int32_t                 expert = int32_t(random() % unsigned(layer.layer->n_experts));
    const auto                    same   = [&](const oa_slot & other) { return other.expert == expert; };
    if (slots.slots[slot].locked || std::any_of(slots.slots.begin(), slots.slots.end(), same)) {
        return std::nullopt;
    }
    return oa_slot_change{ slot, expert, 1 };
}

void oa_expert_slots::take(cached_layer & layer, const oa_slot_change & change, std::vector<oa_slot_upload> & chosen) {
    oa_slot & slot = layer.layer->slots->slots[change.slot];
    if (slot.expert >= 0) {
        hide(layer, slot.expert);
    }
    slot = { change.expert, true };
    ++layer.n_locked;
    chosen.push_back({ layer.layer, change.slot, change.expert });
    if (oa_slots_seam().unordered) {
        show(layer, change.expert, change.slot);
    }
}

void oa_expert_slots::show(cached_layer & layer, int32_t expert, size_t slot) {
    layer.numbers[size_t(expert)] = int32_t(slot);
    layer.is_stale                = true;
}

void oa_expert_slots::hide(cached_layer & layer, int32_t expert) {
    layer.numbers[size_t(expert)] = nothing(*layer.layer->slots);
    layer.is_stale                = true;
}

// One write for each device, since each may be a message.
void oa_expert_slots::write_tables(ggml_backend_sched_t sched) {
    std::set<ggml_tensor *> tables;
    for (const cached_layer & layer : layers_) {
        if (layer.is_stale) {
            tables.insert(layer.layer->slots->device_table);
        }
    }
    if (tables.empty()) {
        return;
    }
    ggml_backend_sched_synchronize(sched);
    for (ggml_tensor * table : tables) {
        write_device_table(table);
    }
    for (cached_layer & layer : layers_) {
        if (std::exchange(layer.is_stale, false)) {
            auto * host = static_cast<int32_t *>(layer.layer->slots->host_table->data);
            for (size_t e = 0; e < layer.numbers.size(); ++e) {
                host[e] = layer.numbers[e] == nothing(*layer.layer->slots) ? int32_t(e) : -1;
            }
        }
    }
}

// From the first to the last layer that changed.
void oa_expert_slots::write_device_table(ggml_tensor * table) {
    const size_t         nbytes = table->nb[2], n = size_t(table->ne[1]);
    std::vector<int32_t> numbers;
    int64_t              first = -1;
    size_t               end   = 0;
    for (const cached_layer & layer : layers_) {
        const oa_layer_slots & slots = *layer.layer->slots;
        if (slots.device_table != table || (first < 0 && !layer.is_stale)) {
            continue;
        }
        first = first < 0 ? slots.row : first;
        numbers.insert(numbers.end(), layer.numbers.begin(), layer.numbers.end());
        end = layer.is_stale ? numbers.size() : end;
    }
    ggml_backend_tensor_set(table, numbers.data(), size_t(first) * nbytes, end / n * nbytes);
}
