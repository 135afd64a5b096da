// Captures llama.cpp's errors while a probe runs, so that they can be part of an exception's text instead of noise on
// the terminal. llama.cpp has one log callback per process: captures of several threads follow each other.
#pragma once

#include "llama.h"

#include <mutex>
#include <string>

class oa_log_capture {
  public:
    oa_log_capture();
    ~oa_log_capture();

    oa_log_capture(const oa_log_capture &)             = delete;
    oa_log_capture & operator=(const oa_log_capture &) = delete;

    // The errors so far, one a line; those of other threads that log meanwhile are among them.
    std::string errors() const;

    void clear();

  private:
    std::unique_lock<std::mutex> only_one_;
    ggml_log_callback            previous_           = nullptr;
    void *                       previous_user_data_ = nullptr;
};
