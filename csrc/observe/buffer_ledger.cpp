#include "buffer_ledger.h"

#include "ggml-backend-impl.h"

#include <algorithm>
#include <mutex>

namespace {

struct ledger {
    std::mutex                             mutex;
    std::map<std::string, oa_ledger_entry> entries;
};

// Never destroyed: backends free buffers from static destructors, after ours would have run.
ledger & the_ledger() {
    static ledger * instance = new ledger;
    return *instance;
}

// A multi-buffer only groups buffers that are counted themselves.
bool counted(ggml_backend_buffer_t buffer) {
    return !ggml_backend_buffer_is_multi_buffer(buffer);
}

} // namespace

void oa_buffer_ledger_add(ggml_backend_buffer_t buffer) {
    if (!counted(buffer)) {
        return;
    }
    auto & l = the_ledger();

    std::lock_guard<std::mutex> lock(l.mutex);

    auto & entry = l.entries[ggml_backend_buft_name(buffer->buft)];
    entry.current += buffer->size;
    entry.peak = std::max(entry.peak, entry.current);
}

void oa_buffer_ledger_remove(ggml_backend_buffer_t buffer) {
    if (!counted(buffer)) {
        return;
    }
    auto & l = the_ledger();

    std::lock_guard<std::mutex> lock(l.mutex);
    l.entries[ggml_backend_buft_name(buffer->buft)].current -= buffer->size;
}

std::map<std::string, oa_ledger_entry> oa_buffer_ledger_get() {
    auto & l = the_ledger();

    std::lock_guard<std::mutex> lock(l.mutex);
    return l.entries;
}

void oa_buffer_ledger_reset_peak() {
    auto & l = the_ledger();

    std::lock_guard<std::mutex> lock(l.mutex);
    for (auto & [name, entry] : l.entries) {
        entry.peak = entry.current;
    }
}
