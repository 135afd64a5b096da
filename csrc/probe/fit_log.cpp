#include "fit_log.h"

#include "log.h"

#include <cstdarg>
#include <cstdio>
#include <utility>
#include <vector>

namespace {

thread_local oa_fit_log t_log;

} // namespace

int common_log_get_verbosity_thold() {
    return LOG_LEVEL_TRACE;
}

bool common_log_get_jsonl() {
    return false;
}

common_log * common_log_main() {
    return nullptr; // only handed on to common_log_add
}

void common_log_add(common_log *, ggml_log_level level, const char * fmt, ...) {
    va_list args;
    va_start(args, fmt);
    va_list again;
    va_copy(again, args);
    std::vector<char> line(std::vsnprintf(nullptr, 0, fmt, args) + 1);
    std::vsnprintf(line.data(), line.size(), fmt, again);
    va_end(again);
    va_end(args);

    t_log.text += line.data();
    if (level == GGML_LOG_LEVEL_WARN || level == GGML_LOG_LEVEL_ERROR) {
        t_log.last_complaint = line.data();
    }
}

void common_log_add_json(common_log *, const char *, const common_json &) {} // never called: jsonl is off

oa_fit_log oa_fit_log_take() {
    return std::exchange(t_log, {});
}
