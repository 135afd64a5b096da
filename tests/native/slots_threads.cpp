// Two contexts of one model, whose experts come and go in slots, and the copier, at once
// (csrc/segments/expert_slots.h): slots_threads STEPS [unordered]. Every step reads the tables of both sides and the
// slots that they lead to, as a graph does. An expert that both sides compute, or neither, or a slot without the expert
// that it should have, is counted. unordered: tables change before uploads end, which is to be counted, too. Prints
// {"steps", "hits", "uploads", "wrong"}.
#include "expert_slots.h"
#include "ggml-cpu.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <thread>

namespace {

constexpr int n_experts = 16, n_slots = 4, n_used = 4, n_layers = 3, width = 256;

struct memory {
    ggml_context *        ctx    = ggml_init({ 64 * ggml_tensor_overhead(), nullptr, true });
    ggml_backend_buffer_t buffer = nullptr;

    ggml_tensor * tensor(int64_t a, int64_t b, int64_t c) { return ggml_new_tensor_3d(ctx, GGML_TYPE_I32, a, b, c); }

    void allocate() {
        buffer = ggml_backend_alloc_ctx_tensors_from_buft(ctx, ggml_backend_cpu_buffer_type());
        ggml_backend_buffer_clear(buffer, 0);
    }

    ~memory() {
        ggml_backend_buffer_free(buffer);
        ggml_free(ctx);
    }
};

int32_t * values(const ggml_tensor * t) {
    return static_cast<int32_t *>(t->data);
}

void add_layers(std::deque<oa_expert_layer> & layers, memory & memory, ggml_backend_dev_t device) {
    ggml_tensor * const table = memory.tensor(1, n_experts, n_layers);
    for (int il = 0; il < n_layers; ++il) {
        oa_expert_layer & layer = layers.emplace_back(il, n_experts, device);
        layer.slots             = std::make_unique<oa_layer_slots>();
        oa_layer_slots & slots  = *layer.slots;
        slots.device            = device;
        slots.device_table      = table;
        slots.row               = il;
        slots.host_table        = memory.tensor(1, n_experts, 1);
        slots.slots.resize(n_slots);
        for (int i = 0; i < 2; ++i) {
            slots.weights.push_back({ memory.tensor(width, 2, n_experts), memory.tensor(width, 2, n_slots + 1) });
        }
    }
    memory.allocate();
    for (const oa_expert_layer & layer : layers) {
        for (int e = 0; e < n_experts; ++e) {
            values(table)[layer.number * n_experts + e] = n_slots;
            values(layer.slots->host_table)[e]          = e;
            for (const auto & [weight, part] : layer.slots->weights) {
                std::fill_n(values(weight) + e * width * 2, width * 2, e);
            }
        }
    }
}

bool is_wrong(const oa_expert_layer & layer, int32_t expert, int64_t & n_hits) {
    const oa_layer_slots & slots = *layer.slots;
    const int32_t          there = values(slots.device_table)[slots.row * n_experts + expert];
    const bool             here  = values(slots.host_table)[expert] == expert;
    bool                   wrong = here != (there == n_slots);
    n_hits += !here;
    for (const auto & [weight, part] : slots.weights) {
        const int32_t * found = values(part) + there * width * 2;
        wrong |= !here && std::any_of(found, found + width * 2, [&](int32_t v) { return v != expert; });
    }
    return wrong;
}

struct counts {
    int64_t hits = 0, wrong = 0;
};

// A context. Choices come from a few experts that change slowly.
void compute(std::deque<oa_expert_layer> & layers, oa_expert_slots & experts, int n_steps, unsigned seed,
             counts & found) {
    ggml_backend_t             cpu   = ggml_backend_cpu_init();
    ggml_backend_buffer_type_t buft  = ggml_backend_cpu_buffer_type();
    ggml_backend_sched_t       sched = ggml_backend_sched_new(&cpu, &buft, 1, 64, false, false);
    std::minstd_rand           random(seed);
    for (int step = 0; step < n_steps; ++step) {
        if (!experts.step(sched, step % 16 == 15 ? 64 : 1).empty()) {
            std::abort();
        }
        for (oa_expert_layer & layer : layers) {
            std::vector<int32_t> ids;
            int64_t              n_hits = 0;
            while (ids.size() < n_used) {
                const int32_t expert = int32_t((random() % 6 + unsigned(step) / 20 + ids.size()) % n_experts);
                if (std::find(ids.begin(), ids.end(), expert) == ids.end()) {
                    ids.push_back(expert);
                    found.wrong += is_wrong(layer, expert, n_hits);
                }
            }
            layer.note(ids, n_used, n_hits);
            found.hits += n_hits;
        }
        experts.idle(sched);
        if (random() % 4 == 0) {
            std::this_thread::yield();
        }
    }
    ggml_backend_sched_free(sched);
    ggml_backend_free(cpu);
}

} // namespace

int main(int argc, char ** argv) {
    const int n_steps         = argc > 1 ? std::atoi(argv[1]) : 1000;
    oa_slots_seam().delay_us  = 50;
    oa_slots_seam().unordered = argc > 2 && std::string(argv[2]) == "unordered";

    ggml_backend_t              cpu = ggml_backend_cpu_init();
    memory                      memory;
    std::deque<oa_expert_layer> layers;
    add_layers(layers, memory, ggml_backend_get_device(cpu));
    counts  found[2];
    int64_t uploads = 0;
    {
        oa_expert_slots experts(layers);
        std::thread     other([&] { compute(layers, experts, n_steps, 2, found[1]); });
        compute(layers, experts, n_steps, 1, found[0]);
        other.join();
    }
    for (const oa_expert_layer & layer : layers) {
        uploads += layer.uploads;
    }
    std::printf("{\"steps\": %d, \"hits\": %lld, \"uploads\": %lld, \"wrong\": %lld}\n", 2 * n_steps,
                (long long) (found[0].hits + found[1].hits), (long long) uploads,
                (long long) (found[0].wrong + found[1].wrong));
    ggml_backend_free(cpu);
    return 0;
}
