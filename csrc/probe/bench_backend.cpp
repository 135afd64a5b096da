#include "bench_backend.h"

#include "ggml-backend-impl.h"
#include "waiting.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <stdexcept>

constexpr int    max_samples = 500;
constexpr double undisturbed = 0.02; // of a repeat: the longest that threads may wait for CPUs in a clean one
constexpr double patience    = 4.0;  // times max_s, for clean repeats
constexpr double calm        = 0.05; // spread, as a share of the median, at which a measurement may end early

ggml_backend_dev_t oa_require_device(const std::string & name) {
    if (ggml_backend_dev_t dev = ggml_backend_dev_by_name(name.c_str())) {
        return dev;
    }
    std::string known;
    for (size_t i = 0; i < ggml_backend_dev_count(); ++i) {
        known += (i ? ", " : "") + std::string(ggml_backend_dev_name(ggml_backend_dev_get(i)));
    }
    throw std::invalid_argument("unknown device '" + name + "' (devices here: " + known + ")");
}

ggml_backend_ptr oa_make_backend(ggml_backend_dev_t dev, int n_threads) {
    ggml_backend_ptr backend(ggml_backend_dev_init(dev, nullptr));
    if (!backend) {
        throw std::runtime_error(std::string("device '") + ggml_backend_dev_name(dev) + "' could not be initialised");
    }
    auto * set_n_threads = (ggml_backend_set_n_threads_t) ggml_backend_reg_get_proc_address(
        ggml_backend_dev_backend_reg(dev), "ggml_backend_set_n_threads");
    if (set_n_threads) {
        set_n_threads(backend.get(), n_threads);
    }
    return backend;
}

ggml_backend_buffer_type_t oa_weight_buffer_type(ggml_backend_dev_t dev, ggml_tensor * weight, ggml_tensor * op,
                                                 bool use_extra_bufts) {
    auto * extra = (ggml_backend_dev_get_extra_bufts_t) ggml_backend_reg_get_proc_address(
        ggml_backend_dev_backend_reg(dev), "ggml_backend_dev_get_extra_bufts");
    if (use_extra_bufts && extra) {
        for (ggml_backend_buffer_type_t * buft = extra(dev); buft && *buft; ++buft) {
            // As the loader does: ask with the weight pretending to lie in an empty buffer of that type.
            ggml_backend_buffer_ptr probe(ggml_backend_buft_alloc_buffer(*buft, 0));
            weight->buffer       = probe.get();
            const bool supported = ggml_backend_dev_supports_op(dev, op);
            weight->buffer       = nullptr;
            if (supported) {
                return *buft;
            }
        }
    }
    return ggml_backend_dev_buffer_type(dev);
}

void oa_wait_for(const ggml_tensor * tensor) {
    uint8_t byte;
    ggml_backend_tensor_get(tensor, &byte, 0, sizeof(byte));
}

namespace {

double median_of(std::vector<double> v) {
    std::sort(v.begin(), v.end());
    return v.size() % 2 ? v[v.size() / 2] : 0.5 * (v[v.size() / 2 - 1] + v[v.size() / 2]);
}

// The median absolute deviation.
double spread_of(const std::vector<double> & samples) {
    const double        middle = median_of(samples);
    std::vector<double> deviations;
    for (const double s : samples) {
        deviations.push_back(std::fabs(s - middle));
    }
    return median_of(deviations);
}

std::vector<double> faster_half(std::vector<double> samples) {
    std::sort(samples.begin(), samples.end());
    samples.resize((samples.size() + 1) / 2);
    return samples;
}

oa_timing summarise(const std::vector<double> & samples, double clean) {
    return { median_of(samples), *std::min_element(samples.begin(), samples.end()), spread_of(samples),
             int(samples.size()), clean };
}

} // namespace

oa_timing oa_measure(const std::function<void()> & once, double divisor, int min_repeats, double min_s, double max_s,
                     const std::function<void()> & before) {
    using clock = std::chrono::steady_clock;
    once();

    // Where hardly anything is measured, nothing is waited for.
    const double        longest_s = min_s > 0.0 && max_s >= min_s ? patience * max_s : max_s;
    std::vector<double> clean, all;
    double              total = 0.0, clean_total = 0.0;
    while (true) {
        before();
        const double waited = oa_waited_s();
        const auto   start  = clock::now();
        once();
        const double seconds = std::chrono::duration<double>(clock::now() - start).count();
        total += seconds;
        all.push_back(seconds / divisor);
        if (oa_waited_s() - waited <= undisturbed * seconds) {
            clean_total += seconds;
            clean.push_back(seconds / divisor);
        }
        const bool enough = int(clean.size()) >= min_repeats;
        const bool usable = enough || clean.size() == all.size();
        const bool steady = enough && clean_total >= min_s && spread_of(clean) <= calm * median_of(clean);
        if (steady || total >= (usable ? max_s : longest_s) || int(all.size()) >= max_samples) {
            return summarise(usable ? clean : faster_half(all), double(clean.size()) / double(all.size()));
        }
    }
}
