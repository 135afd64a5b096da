// Takes the place of upstream's common/log.cpp for the copy of common/fit.cpp in this module: its lines are kept, and
// no logging thread prints them to the user's terminal. The symbols are hidden; llama-common keeps its own logger.
#pragma once

#include <string>

struct oa_fit_log {
    std::string text;
    std::string last_complaint; // the last line at warning level or above
};

// The lines of this thread since the last call.
oa_fit_log oa_fit_log_take();
