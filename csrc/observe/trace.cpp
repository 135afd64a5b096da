#include "trace.h"

#include "ggml-impl.h"

#include <atomic>
#include <chrono>
#include <future>
#include <mutex>
#include <utility>

namespace {

std::atomic<bool>          g_enabled{ false };
std::mutex                 g_mutex;
std::vector<oa_trace_span> g_spans;

// Waits for the split that this thread let run beside its next one.
thread_local std::future<void> t_beside;

int64_t now_ns() {
    const auto since = std::chrono::steady_clock::now().time_since_epoch();
    return std::chrono::duration_cast<std::chrono::nanoseconds>(since).count();
}

// A backend is named after its kind on some devices, and after the device on others.
const char * device_name(ggml_backend_t backend) {
    return ggml_backend_dev_name(ggml_backend_get_device(backend));
}

// A remote device may say that it is done before it is; what is read back is there.
void read_a_byte(const ggml_tensor * tensor) {
    const ggml_backend_buffer_t buffer = tensor->view_src ? tensor->view_src->buffer : tensor->buffer;
    if (buffer && !ggml_backend_buffer_is_host(buffer) && ggml_nbytes(tensor) > 0) {
        char byte;
        ggml_backend_tensor_get(tensor, &byte, 0, sizeof(byte));
    }
}

void wait_computed(int64_t begin, ggml_backend_t backend, const ggml_cgraph * graph) {
    ggml_backend_synchronize(backend);
    read_a_byte(graph->nodes[graph->n_nodes - 1]);
    oa_trace_add(device_name(backend), "compute", graph->nodes[0]->name, 0, begin);
}

} // namespace

void oa_trace_set_enabled(bool enabled) {
    g_enabled.store(enabled, std::memory_order_relaxed);
}

std::vector<oa_trace_span> oa_trace_take() {
    const std::lock_guard<std::mutex> lock(g_mutex);
    return std::exchange(g_spans, {});
}

void oa_trace_add(const char * device, const char * what, const char * name, size_t nbytes, int64_t begin_ns) {
    if (begin_ns != 0) {
        const std::lock_guard<std::mutex> lock(g_mutex);
        g_spans.push_back({ device, what, name, nbytes, double(begin_ns) * 1e-9, double(now_ns()) * 1e-9 });
    }
}

int64_t oa_trace_now(void) {
    return g_enabled.load(std::memory_order_relaxed) ? now_ns() : 0;
}

void oa_trace_computed(int64_t begin, ggml_backend_t backend, const ggml_cgraph * graph, bool beside) {
    if (begin == 0 || graph->n_nodes == 0) {
        return;
    }
    if (beside) {
        t_beside = std::async(std::launch::async, wait_computed, begin, backend, graph);
        return;
    }
    wait_computed(begin, backend, graph);
    if (t_beside.valid()) {
        t_beside.get();
    }
}

void oa_trace_copied(int64_t begin, ggml_backend_t backend, const ggml_tensor * input) {
    if (begin != 0) {
        ggml_backend_synchronize(backend);
        const bool weight = ggml_backend_buffer_get_usage(input->buffer) == GGML_BACKEND_BUFFER_USAGE_WEIGHTS;
        oa_trace_add(device_name(backend), weight ? "upload" : "data", input->name, ggml_nbytes(input), begin);
    }
}
