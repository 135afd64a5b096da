#include "link_bench.h"

#include "ggml-alloc.h"
#include "ggml.h"
#include "thread_team.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <stdexcept>
#include <thread>

namespace {

constexpr int    n_products   = 16; // in one graph, where hand-overs are timed
constexpr int    min_rounds   = 5;
constexpr int    min_copies   = 3;
constexpr int    max_rounds   = 40;
constexpr int    max_products = 100;  // of the faster side, beside one of the slower
constexpr double min_steps_s  = 0.05; // steps that are timed as one
constexpr double min_copies_s = 0.002;
constexpr double min_beside_s = 0.3; // for copies and computing side by side
constexpr size_t beside_bytes = 16 << 20;
// A product of 32 MiB of weights works so long that the other side's threads fall asleep, as they do in a model.
constexpr int64_t switch_width = oa_switch_bytes / sizeof(float);
// 8 MiB are about half of a feed-forward of a small model. Where both sides compute on the same CPUs, more would hide
// that a thread which is woken may wait for a CPU, however little it has to compute.
constexpr int64_t beside_width = 2048;

ggml_context_ptr make_context(size_t n_tensors) {
    return ggml_context_ptr(ggml_init({ n_tensors * ggml_tensor_overhead() + ggml_graph_overhead(), nullptr, true }));
}

double seconds_of(const std::function<void()> & f) {
    const auto start = std::chrono::steady_clock::now();
    f();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// What a host does between two copies of a graph: computes. Threads and cores that carry out copies fall asleep
// meanwhile.
void work_a_while() {
    const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(1);
    while (std::chrono::steady_clock::now() < end) {
    }
}

void measure_both(std::vector<oa_link_timing> & out, ggml_tensor * t, void * host, const char * memory, size_t nbytes,
                  double max_s, oa_patience & patience) {
    const auto time = [&](const std::function<void()> & f) {
        return oa_measure(f, 1.0, min_copies, min_copies_s, max_s, patience, work_a_while);
    };
    // A remote device may acknowledge a write before it has arrived: wait by a tiny read, whose own time, awake, is
    // taken off.
    const oa_timing wait = oa_measure([&] { oa_wait_for(t); }, 1.0, min_copies, min_copies_s, max_s, patience);
    oa_timing       h2d  = time([&] {
        ggml_backend_tensor_set(t, host, 0, nbytes);
        oa_wait_for(t);
    });
    h2d.median_s         = std::max(h2d.median_s - wait.median_s, 1e-7);
    out.push_back({ "h2d", memory, nbytes, h2d });
    out.push_back({ "d2h", memory, nbytes, time([&] { ggml_backend_tensor_get(t, host, 0, nbytes); }) });
}

// A weight of the chain on one side.
struct side {
    ggml_backend_t          backend;
    ggml_context_ptr        ctx;
    ggml_backend_buffer_ptr buffer;
    ggml_tensor *           weight;

    side(ggml_backend_t backend, int64_t width) : backend(backend), ctx(make_context(1)) {
        weight = ggml_new_tensor_2d(ctx.get(), GGML_TYPE_F16, width, width);
        buffer.reset(ggml_backend_alloc_ctx_tensors(ctx.get(), backend));
        if (!buffer) {
            throw std::runtime_error("not enough memory for the hand-over probe");
        }
        ggml_backend_buffer_set_usage(buffer.get(), GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
        ggml_backend_buffer_clear(buffer.get(), 0);
    }
};

// A chain of n matrix-vector products of which every second one runs on `odd`.
class chain {
  public:
    chain(int n, const side & even, const side & odd, ggml_backend_t device, ggml_backend_t cpu) :
        ctx_(make_context(size_t(n) + 8)) {
        ggml_backend_t backends[] = { device, cpu };
        // llama.cpp's CPU buffer for results is memory that the device reads fast, where there is such.
        ggml_backend_buffer_type_t pinned  = ggml_backend_dev_host_buffer_type(ggml_backend_get_device(device));
        ggml_backend_buffer_type_t types[] = { ggml_backend_get_default_buffer_type(device),
                                               pinned ? pinned : ggml_backend_get_default_buffer_type(cpu) };
        sched_.reset(ggml_backend_sched_new(backends, types, 2, GGML_DEFAULT_GRAPH_SIZE, false, false));
        graph_ = ggml_new_graph(ctx_.get());
        last_  = ggml_new_tensor_1d(ctx_.get(), GGML_TYPE_F32, even.weight->ne[0]);
        ggml_set_input(last_);
        ggml_backend_sched_set_tensor_backend(sched_.get(), last_, even.backend);
        for (int i = 0; i < n; ++i) {
            const side & s = i % 2 ? odd : even;
            last_          = ggml_mul_mat(ctx_.get(), s.weight, last_);
            ggml_backend_sched_set_tensor_backend(sched_.get(), last_, s.backend);
        }
        ggml_set_output(last_);
        ggml_build_forward_expand(graph_, last_);
        if (!ggml_backend_sched_alloc_graph(sched_.get(), graph_)) {
            throw std::runtime_error("not enough memory for the hand-over probe");
        }
    }

    void submit() const {
        const oa_all_threads all;
        ggml_backend_sched_graph_compute_async(sched_.get(), graph_);
    }

    void finish() const {
        ggml_backend_sched_synchronize(sched_.get());
        oa_wait_for(last_);
    }

    double seconds() const {
        return seconds_of([&] {
            submit();
            finish();
        });
    }

  private:
    ggml_context_ptr       ctx_;
    ggml_backend_sched_ptr sched_;
    ggml_cgraph *          graph_;
    ggml_tensor *          last_;
};

int times(double longer, double shorter) {
    return int(std::clamp(std::round(longer / shorter), 1.0, double(max_products)));
}

} // namespace

std::vector<oa_link_timing> oa_link_bench(const std::string & device, const std::vector<size_t> & sizes, double max_s) {
    ggml_backend_dev_t         dev      = oa_require_device(device);
    oa_patience                patience = oa_patience_for(dev, max_s);
    const size_t               limit    = *std::max_element(sizes.begin(), sizes.end());
    const ggml_context_ptr     ctx      = make_context(1);
    ggml_tensor *              tensor   = ggml_new_tensor_1d(ctx.get(), GGML_TYPE_I8, int64_t(limit));
    ggml_backend_buffer_type_t pinned   = ggml_backend_dev_host_buffer_type(dev);

    const ggml_backend_buffer_ptr buffer(
        ggml_backend_alloc_ctx_tensors_from_buft(ctx.get(), ggml_backend_dev_buffer_type(dev)));
    const ggml_backend_buffer_ptr pinned_buffer(pinned ? ggml_backend_buft_alloc_buffer(pinned, limit) : nullptr);
    if (!buffer) {
        throw std::runtime_error("not enough memory on " + device + " for the link probe");
    }
    std::vector<uint8_t>        pageable(limit, 1);
    std::vector<oa_link_timing> result;
    for (const size_t nbytes : sizes) {
        measure_both(result, tensor, pageable.data(), "pageable", nbytes, max_s, patience);
        if (pinned_buffer) {
            measure_both(result, tensor, ggml_backend_buffer_get_base(pinned_buffer.get()), "pinned", nbytes, max_s,
                         patience);
        }
    }
    return result;
}

double oa_switch_bench(const std::string & device, int n_threads, double max_s) {
    const ggml_backend_ptr dev = oa_make_backend(oa_require_device(device), n_threads);
    const ggml_backend_ptr cpu = oa_make_backend(ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU), n_threads);
    const side             on_device(dev.get(), switch_width), on_cpu(cpu.get(), switch_width);

    const chain         mixed(n_products, on_device, on_cpu, dev.get(), cpu.get());
    const chain         device_only(n_products, on_device, on_device, dev.get(), cpu.get());
    const chain         cpu_only(n_products, on_cpu, on_cpu, dev.get(), cpu.get());
    std::vector<double> changes;
    double              spent = 0.0;
    for (int round = 0; round < max_rounds && (round <= min_rounds || spent < max_s); ++round) {
        // In turn: the three must see the same machine, whose speed drifts by more than a change costs.
        const double whole = mixed.seconds(), a = device_only.seconds(), b = cpu_only.seconds();
        if (round > 0) {
            // The products of the mixed chain are half of one and half of the other; what is left is its changes.
            changes.push_back((whole - 0.5 * (a + b)) / (n_products - 1));
        }
        spent += whole + a + b;
    }
    return std::max(0.0, oa_median(std::move(changes)));
}

double oa_concurrency_bench(const std::string & device, int n_threads, double max_s) {
    const ggml_backend_ptr dev = oa_make_backend(oa_require_device(device), n_threads);
    const ggml_backend_ptr cpu = oa_make_backend(ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU), n_threads);
    const side             on_device(dev.get(), beside_width), on_cpu(cpu.get(), beside_width);
    const auto             device_chain = [&](int n) { return chain(n, on_device, on_device, dev.get(), cpu.get()); };
    const auto             cpu_chain    = [&](int n) { return chain(n, on_cpu, on_cpu, dev.get(), cpu.get()); };

    oa_patience none = oa_patience_for(oa_require_device(device), 0.0);
    const auto  time = [&](const chain & c) {
        return oa_measure([&] { c.seconds(); }, 1.0, 5, 0.0, 0.5, none).median_s;
    };
    // Both sides compute for about as long, and then wait for each other, as in divided operators.
    const double device_s = time(device_chain(1)), cpu_s = time(cpu_chain(1));
    const chain  on_the_device = device_chain(times(cpu_s, device_s)), on_the_cpu = cpu_chain(times(device_s, cpu_s));
    const int    n_steps = int(std::ceil(min_steps_s / std::max(device_s, cpu_s)));
    const auto   steps   = [&](const std::function<void()> & step) {
        return seconds_of([&] {
            for (int i = 0; i < n_steps; ++i) {
                step();
            }
        });
    };
    std::vector<double> shares;
    double              spent = 0.0;
    for (int round = 0; round < max_rounds && (round <= min_rounds || spent < max_s); ++round) {
        const double a    = steps([&] { on_the_device.seconds(); });
        const double b    = steps([&] { on_the_cpu.seconds(); });
        const double both = steps([&] { on_the_device.submit(), on_the_cpu.seconds(), on_the_device.finish(); });
        if (round > 0) {
            shares.push_back((a + b - both) / std::min(a, b));
        }
        spent += a + b + both;
    }
    return std::clamp(oa_median(std::move(shares)), 0.0, 1.0);
}

double oa_overlap_bench(const std::string & device, int n_threads, double max_s) {
    using clock              = std::chrono::steady_clock;
    const auto seconds_since = [](clock::time_point t) {
        return std::chrono::duration<double>(clock::now() - t).count();
    };

    ggml_backend_dev_t     dev_ptr = oa_require_device(device);
    const ggml_backend_ptr dev     = oa_make_backend(dev_ptr, n_threads);
    const ggml_backend_ptr cpu     = oa_make_backend(ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU), n_threads);
    const side             on_device(dev.get(), switch_width);
    const chain            work(n_products, on_device, on_device, dev.get(), cpu.get());

    const ggml_context_ptr        ctx    = make_context(1);
    ggml_tensor *                 target = ggml_new_tensor_1d(ctx.get(), GGML_TYPE_I8, int64_t(beside_bytes));
    const ggml_backend_buffer_ptr buffer(
        ggml_backend_alloc_ctx_tensors_from_buft(ctx.get(), ggml_backend_dev_buffer_type(dev_ptr)));
    if (!buffer) {
        throw std::runtime_error("not enough memory on " + device + " for the overlap probe");
    }
    // Streams copy from pinned memory, where there is such.
    ggml_backend_buffer_type_t    pinned = ggml_backend_dev_host_buffer_type(dev_ptr);
    const ggml_backend_buffer_ptr source(
        ggml_backend_buft_alloc_buffer(pinned ? pinned : ggml_backend_cpu_buffer_type(), beside_bytes));
    if (!source) {
        throw std::runtime_error("not enough memory on the host for the overlap probe");
    }
    ggml_backend_buffer_clear(source.get(), 1);
    const auto copy = [&] {
        ggml_backend_tensor_set(target, ggml_backend_buffer_get_base(source.get()), 0, beside_bytes);
    };

    work.seconds();
    oa_patience  patience  = oa_patience_for(dev_ptr, max_s);
    const double one_chain = oa_measure([&] { work.seconds(); }, 1.0, 5, 0.1, 0.5 * max_s, patience).median_s;
    const double one_copy  = oa_measure(copy, 1.0, 5, 0.1, 0.5 * max_s, patience).median_s;

    std::atomic<bool> stop{ false };
    int               n_copies = 0, n_chains = 0;
    const auto        start = clock::now();
    std::thread       copier([&] {
        while (!stop) {
            copy();
            ++n_copies;
        }
    });
    while (n_chains < 2 || seconds_since(start) < min_beside_s) {
        work.seconds();
        ++n_chains;
    }
    stop = true;
    copier.join();
    const double done = n_chains * one_chain + n_copies * one_copy;
    return std::clamp(done / seconds_since(start) - 1.0, 0.0, 1.0);
}
