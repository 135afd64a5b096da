#include "log_capture.h"

oa_log_capture::oa_log_capture() {
    llama_log_get(&previous_, &previous_user_data_);
    llama_log_set(collect, this);
}

oa_log_capture::~oa_log_capture() {
    llama_log_set(previous_, previous_user_data_);
}

void oa_log_capture::collect(ggml_log_level level, const char * text, void * self) {
    auto * capture = static_cast<oa_log_capture *>(self);
    if (level != GGML_LOG_LEVEL_CONT) {
        capture->last_ = level;
    }
    if (capture->last_ == GGML_LOG_LEVEL_ERROR) {
        capture->errors_ += text;
    }
}
