// What llama.cpp and ggml say while nobody listens: without debug messages, of which a GPU's profile makes thousands.
#include "bindings.h"
#include "llama.h"

#include <atomic>
#include <cstdlib>

namespace {

std::atomic<ggml_log_level> g_last{ GGML_LOG_LEVEL_NONE };
ggml_log_callback           g_print;

void print_without_debug(ggml_log_level level, const char * text, void *) {
    if (level != GGML_LOG_LEVEL_CONT) {
        g_last = level;
    }
    if (g_last != GGML_LOG_LEVEL_DEBUG) {
        g_print(level, text, nullptr);
    }
}

} // namespace

void hide_debug_messages() {
    if (std::getenv("OALLAMA_DEBUG")) {
        return;
    }
    ggml_log_callback listener = nullptr;
    void *            data     = nullptr;
    llama_log_get(&listener, &data);
    llama_log_set(nullptr, nullptr);
    void * none = nullptr;
    llama_log_get(&g_print, &none);
    const bool is_heard = listener != g_print; // llama_cpp was imported before
    llama_log_set(is_heard ? listener : print_without_debug, data);
}
