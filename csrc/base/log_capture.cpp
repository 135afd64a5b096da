#include "log_capture.h"

namespace {

std::mutex g_capture;

// Outlives every capture: a thread may still be logging through the callback when a capture ends.
std::mutex     g_text_mutex;
std::string    g_text;
ggml_log_level g_last = GGML_LOG_LEVEL_NONE;

void collect(ggml_log_level level, const char * text, void *) {
    std::lock_guard<std::mutex> lock(g_text_mutex);
    if (level != GGML_LOG_LEVEL_CONT) {
        g_last = level;
    }
    if (g_last == GGML_LOG_LEVEL_ERROR) {
        g_text += text;
    }
}

} // namespace

oa_log_capture::oa_log_capture() : only_one_(g_capture) {
    clear();
    llama_log_get(&previous_, &previous_user_data_);
    llama_log_set(collect, nullptr);
}

oa_log_capture::~oa_log_capture() {
    llama_log_set(previous_, previous_user_data_);
}

std::string oa_log_capture::errors() const {
    std::lock_guard<std::mutex> lock(g_text_mutex);
    return g_text;
}

void oa_log_capture::clear() {
    std::lock_guard<std::mutex> lock(g_text_mutex);
    g_text.clear();
    g_last = GGML_LOG_LEVEL_NONE;
}
