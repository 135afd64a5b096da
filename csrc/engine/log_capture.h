// Captures llama.cpp's warnings and errors while a probe runs, so that they can be part of an exception's text
// instead of noise on the terminal. Not thread-safe: llama.cpp has one global log callback.
#pragma once

#include "llama.h"

#include <string>

class oa_log_capture {
  public:
    oa_log_capture();
    ~oa_log_capture();

    oa_log_capture(const oa_log_capture &)             = delete;
    oa_log_capture & operator=(const oa_log_capture &) = delete;

    // The errors so far, one a line.
    const std::string & errors() const { return errors_; }

  private:
    static void collect(ggml_log_level level, const char * text, void * self);

    ggml_log_callback previous_           = nullptr;
    void *            previous_user_data_ = nullptr;
    ggml_log_level    last_               = GGML_LOG_LEVEL_NONE;
    std::string       errors_;
};
