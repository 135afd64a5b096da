#include "op_timer.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <mutex>
#include <utility>

namespace {

using clock_type = std::chrono::steady_clock;

std::atomic<bool>       g_enabled{ false };
std::mutex              g_mutex;
std::vector<oa_op_time> g_records;
std::vector<void (*)()> g_flushes;

thread_local clock_type::time_point t_last;

double values_bytes(const ggml_tensor * t, double n_values) {
    return n_values * double(ggml_type_size(t->type)) / double(ggml_blck_size(t->type));
}

double bytes_of(const ggml_tensor * t) {
    return values_bytes(t, double(ggml_nelements(t)));
}

// Lookups read the rows that are wanted, and of a mixture's weights each expert that is chosen counts once.
double least_bytes(const ggml_tensor * node) {
    const double result = bytes_of(node);
    switch (node->op) {
        case GGML_OP_GET_ROWS: return result + values_bytes(node->src[0], double(ggml_nelements(node)));
        case GGML_OP_SET_ROWS: return bytes_of(node->src[0]) + values_bytes(node, double(ggml_nelements(node->src[0])));
        case GGML_OP_MUL_MAT_ID: {
            const double n_experts = double(node->src[0]->ne[2]);
            const double chosen    = std::min(n_experts, double(ggml_nelements(node->src[2])));
            return result + bytes_of(node->src[0]) * chosen / n_experts + bytes_of(node->src[1]);
        }
        default: break;
    }
    double all = result;
    for (const ggml_tensor * source : node->src) {
        all += source ? bytes_of(source) : 0.0;
    }
    return all;
}

} // namespace

bool oa_op_timer_enabled(void) {
    return g_enabled.load(std::memory_order_relaxed);
}

void oa_op_timer_set_enabled(bool enabled) {
    g_enabled.store(enabled, std::memory_order_relaxed);
}

oa_op_time oa_op_timer_describe(const char * device, const ggml_tensor * node) {
    return { device, node->name, ggml_op_desc(node), node->src[0] ? node->src[0]->name : "", 0.0, least_bytes(node) };
}

void oa_op_timer_record(oa_op_time record) {
    std::lock_guard<std::mutex> lock(g_mutex);
    g_records.push_back(std::move(record));
}

void oa_op_timer_add_flush(void (*flush)()) {
    std::lock_guard<std::mutex> lock(g_mutex);
    g_flushes.push_back(flush);
}

std::vector<oa_op_time> oa_op_timer_take() {
    std::vector<void (*)()> flushes;
    {
        std::lock_guard<std::mutex> lock(g_mutex);
        flushes = g_flushes;
    }
    for (auto * flush : flushes) {
        flush(); // records through oa_op_timer_record, hence outside the lock
    }
    std::lock_guard<std::mutex> lock(g_mutex);
    return std::exchange(g_records, {});
}

void oa_op_timer_cpu_begin(void) {
    t_last = clock_type::now();
}

void oa_op_timer_cpu_node(const ggml_tensor * node) {
    const auto now    = clock_type::now();
    auto       record = oa_op_timer_describe("CPU", node);
    record.seconds    = std::chrono::duration<double>(now - t_last).count();
    oa_op_timer_record(std::move(record));
    t_last = clock_type::now();
}
