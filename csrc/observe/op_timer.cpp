#include "op_timer.h"

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

} // namespace

bool oa_op_timer_enabled(void) {
    return g_enabled.load(std::memory_order_relaxed);
}

void oa_op_timer_set_enabled(bool enabled) {
    g_enabled.store(enabled, std::memory_order_relaxed);
}

oa_op_time oa_op_timer_describe(const char * device, const ggml_tensor * node) {
    return { device, node->name, ggml_op_desc(node), node->src[0] ? node->src[0]->name : "", 0.0 };
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
