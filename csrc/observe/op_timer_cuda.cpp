#include "op_timer_cuda.h"

#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace {

struct mark {
    cudaEvent_t event  = nullptr;
    int         device = 0;     // ggml's number: virtual ones share a card
    bool        start  = false; // before the first node of a graph
    oa_op_time  record;         // described at once: the graph may be gone when the event is read
};

std::mutex        g_mutex;
std::vector<mark> g_marks;

void flush() {
    std::vector<mark> marks;
    {
        std::lock_guard<std::mutex> lock(g_mutex);
        marks.swap(g_marks);
    }
    for (size_t i = 0; i < marks.size(); ++i) {
        mark & cur = marks[i];
        if (cudaEventSynchronize(cur.event) != cudaSuccess || cur.start || i == 0 ||
            marks[i - 1].device != cur.device) {
            continue;
        }
        float ms = 0.0f;
        if (cudaEventElapsedTime(&ms, marks[i - 1].event, cur.event) == cudaSuccess) {
            cur.record.seconds = ms * 1e-3;
            oa_op_timer_record(std::move(cur.record));
        }
    }
    for (const mark & cur : marks) {
        cudaEventDestroy(cur.event);
    }
}

} // namespace

void oa_op_timer_cuda(int device, cudaStream_t stream, const ggml_tensor * node) {
    if (!oa_op_timer_enabled()) {
        return;
    }
    static std::once_flag once;
    std::call_once(once, [] { oa_op_timer_add_flush(flush); });

    mark m;
    m.device = device;
    if (cudaEventCreate(&m.event) != cudaSuccess || cudaEventRecord(m.event, stream) != cudaSuccess) {
        return; // no record rather than a wrong one; the real error surfaces at ggml's own next CUDA_CHECK
    }
    m.start = node == nullptr;
    if (node) {
        m.record = oa_op_timer_describe(("CUDA" + std::to_string(m.device)).c_str(), node);
    }
    std::lock_guard<std::mutex> lock(g_mutex);
    g_marks.push_back(std::move(m));
}
