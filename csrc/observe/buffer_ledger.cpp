#include "buffer_ledger.h"

#include "ggml-backend-impl.h"

#include <algorithm>
#include <mutex>
#include <unordered_map>

namespace {

struct share {
    oa_ledger_entry * entry; // entries of a map stay where they are
    size_t            nbytes;
};

struct ledger {
    std::mutex                             mutex;
    std::map<std::string, oa_ledger_entry> entries;
    // What each buffer was counted as: ggml-cpu gives a buffer its repacking type after it was made.
    std::unordered_map<ggml_backend_buffer_t, share> live;
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

    l.live[buffer] = { &entry, buffer->size };
}

void oa_buffer_ledger_remove(ggml_backend_buffer_t buffer) {
    auto & l = the_ledger();

    std::lock_guard<std::mutex> lock(l.mutex);
    const auto                  found = l.live.find(buffer);
    if (found != l.live.end()) {
        found->second.entry->current -= found->second.nbytes;
        l.live.erase(found);
    }
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
