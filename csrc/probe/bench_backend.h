// What every probe needs: a backend of one device, buffers on it, and a timer with median and spread.
#pragma once

#include "ggml-backend.h"
#include "ggml-cpp.h"

#include <functional>
#include <string>
#include <vector>

// Of the clean repeats, in which no thread waited for a CPU that others had; of the faster half of all where those are
// too few.
struct oa_timing {
    double median_s = 0.0;
    double best_s   = 0.0; // fastest repeat
    double spread_s = 0.0; // median absolute deviation
    int    repeats  = 0;   // that the numbers above are of
    double clean    = 1.0; // share of all repeats that were clean
};

// Throws std::invalid_argument naming the devices there are.
ggml_backend_dev_t oa_require_device(const std::string & name);

// A backend of `dev`; n_threads is used by CPU devices only.
ggml_backend_ptr oa_make_backend(ggml_backend_dev_t dev, int n_threads);

// The buffer type llama.cpp would choose for this weight on `dev`: on the CPU the first repacking one that supports the
// operator, else the default.
ggml_backend_buffer_type_t oa_weight_buffer_type(ggml_backend_dev_t dev, ggml_tensor * weight, ggml_tensor * op,
                                                 bool use_extra_bufts);

// Waits until `tensor` has been computed by reading a little of it: the RPC backend returns from a graph, and from
// ggml_backend_synchronize, before the server has done the work.
void oa_wait_for(const ggml_tensor * tensor);

// How measurements look for clean repeats beside other work.
struct oa_patience {
    double left_s;      // beyond their own bounds, of all of them together
    bool   has_servers; // what processes that this one started take is no other work
};

oa_patience oa_patience_for(ggml_backend_dev_t dev, double seconds);

// Of one value or more.
double oa_median(std::vector<double> values);

// Runs `once` until at least `min_repeats` runs and `min_s` seconds have been measured and the median is known, or
// until `max_s` have passed. Where other work disturbs and min_s can be reached, up to four times as long while there
// is patience, and a quarter of max_s when there is none left. The first run is a warm-up. Each result is divided by
// `divisor`. `before` runs before each, untimed.
oa_timing oa_measure(
    const std::function<void()> & once, double divisor, int min_repeats, double min_s, double max_s,
    oa_patience & patience, const std::function<void()> & before = [] {});
