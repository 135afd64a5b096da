#include "link_bench.h"

#include "ggml-alloc.h"
#include "ggml.h"

#include <algorithm>
#include <stdexcept>

namespace {

constexpr int n_hand_overs = 32; // in one graph

ggml_context_ptr make_context(size_t n_tensors) {
    return ggml_context_ptr(ggml_init({ n_tensors * ggml_tensor_overhead() + ggml_graph_overhead(), nullptr, true }));
}

void measure_both(std::vector<oa_link_timing> & out, ggml_tensor * t, void * host, const char * memory, size_t nbytes) {
    const auto time = [](const std::function<void()> & f) { return oa_measure(f, 1.0, 5, 0.02, 1.0); };
    // A remote device may acknowledge a write before it has arrived: wait by a tiny read, whose own time is taken off.
    const oa_timing wait = time([&] { oa_wait_for(t); });
    oa_timing       h2d  = time([&] {
        ggml_backend_tensor_set(t, host, 0, nbytes);
        oa_wait_for(t);
    });
    h2d.median_s         = std::max(h2d.median_s - wait.median_s, 1e-7);
    out.push_back({ "h2d", memory, nbytes, h2d });
    out.push_back({ "d2h", memory, nbytes, time([&] { ggml_backend_tensor_get(t, host, 0, nbytes); }) });
}

// A chain of norms of one vector; every second one runs on `odd`.
double chain_seconds(ggml_backend_t even, ggml_backend_t odd, ggml_backend_t last, size_t nbytes, oa_timing & timing) {
    const ggml_context_ptr ctx   = make_context(n_hand_overs + 8);
    ggml_cgraph *          graph = ggml_new_graph(ctx.get());
    ggml_tensor *          cur   = ggml_new_tensor_1d(ctx.get(), GGML_TYPE_F32, nbytes / sizeof(float));
    ggml_set_input(cur);

    ggml_backend_t               backends[] = { even, last };
    const ggml_backend_sched_ptr sched(
        ggml_backend_sched_new(backends, nullptr, 2, GGML_DEFAULT_GRAPH_SIZE, false, false));
    ggml_backend_sched_set_tensor_backend(sched.get(), cur, even);
    for (int i = 0; i < n_hand_overs; ++i) {
        cur = ggml_rms_norm(ctx.get(), cur, 1e-5f); // runs on all threads: the price includes waking and spinning ones
        ggml_backend_sched_set_tensor_backend(sched.get(), cur, i % 2 ? odd : even);
    }
    ggml_set_output(cur);
    ggml_build_forward_expand(graph, cur);
    if (!ggml_backend_sched_alloc_graph(sched.get(), graph)) {
        throw std::runtime_error("not enough memory for the hand-over probe");
    }
    timing = oa_measure(
        [&] {
            ggml_backend_sched_graph_compute_async(sched.get(), graph);
            ggml_backend_sched_synchronize(sched.get());
            oa_wait_for(cur);
        },
        1.0, 9, 0.05, 2.0);
    return timing.median_s;
}

} // namespace

std::vector<oa_link_timing> oa_link_bench(const std::string & device, const std::vector<size_t> & sizes) {
    ggml_backend_dev_t         dev    = oa_require_device(device);
    const size_t               limit  = *std::max_element(sizes.begin(), sizes.end());
    const ggml_context_ptr     ctx    = make_context(1);
    ggml_tensor *              tensor = ggml_new_tensor_1d(ctx.get(), GGML_TYPE_I8, int64_t(limit));
    ggml_backend_buffer_type_t pinned = ggml_backend_dev_host_buffer_type(dev);

    const ggml_backend_buffer_ptr buffer(
        ggml_backend_alloc_ctx_tensors_from_buft(ctx.get(), ggml_backend_dev_buffer_type(dev)));
    const ggml_backend_buffer_ptr pinned_buffer(pinned ? ggml_backend_buft_alloc_buffer(pinned, limit) : nullptr);
    if (!buffer) {
        throw std::runtime_error("not enough memory on " + device + " for the link probe");
    }
    std::vector<uint8_t>        pageable(limit, 1);
    std::vector<oa_link_timing> result;
    for (const size_t nbytes : sizes) {
        measure_both(result, tensor, pageable.data(), "pageable", nbytes);
        if (pinned_buffer) {
            measure_both(result, tensor, ggml_backend_buffer_get_base(pinned_buffer.get()), "pinned", nbytes);
        }
    }
    return result;
}

oa_timing oa_switch_bench(const std::string & device, size_t nbytes, int n_threads) {
    const ggml_backend_ptr dev = oa_make_backend(oa_require_device(device), n_threads);
    const ggml_backend_ptr cpu = oa_make_backend(ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU), n_threads);

    oa_timing    mixed, alone;
    const double both  = chain_seconds(dev.get(), cpu.get(), cpu.get(), nbytes, mixed);
    const double whole = chain_seconds(dev.get(), dev.get(), cpu.get(), nbytes, alone);
    // 31 changes of device in the chain; what is left after one whole graph on the device is their price.
    mixed.median_s = std::max(0.0, both - whole) / (n_hand_overs - 1);
    mixed.spread_s = (mixed.spread_s + alone.spread_s) / (n_hand_overs - 1);
    return mixed;
}
