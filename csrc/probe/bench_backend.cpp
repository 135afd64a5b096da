#include "bench_backend.h"

#include "ggml-backend-impl.h"
#include "waiting.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <stdexcept>

constexpr int    max_samples = 500;
constexpr double undisturbed = 0.02; // of a repeat: the longest that threads may wait for CPUs in a clean one
constexpr double longest     = 4.0;  // times max_s, for clean repeats
constexpr double shortest    = 0.25; // times max_s, beside other work when patience has ended
constexpr double quiet_cpus  = 0.1;  // that others may keep busy
constexpr double ticks_s     = 0.03; // by which counted CPU time may be off
constexpr double look_s      = 0.15; // from then on it tells whether half a CPU was busy
constexpr double known       = 0.03; // error of the median, as a share of it, at which a measurement may end early
// Of so few samples (the index) the range, in standard deviations; deviations from their median tell too little.
constexpr std::array range_of_few = { 0.0, 0.0, 1.128, 1.693, 2.059 };

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

oa_patience oa_patience_for(ggml_backend_dev_t dev, double seconds) {
    return { seconds, ggml_backend_dev_type(dev) != GGML_BACKEND_DEVICE_TYPE_CPU };
}

double oa_median(std::vector<double> v) {
    std::sort(v.begin(), v.end());
    return v.size() % 2 ? v[v.size() / 2] : 0.5 * (v[v.size() / 2 - 1] + v[v.size() / 2]);
}

namespace {

// The median absolute deviation.
double spread_of(const std::vector<double> & samples) {
    const double        middle = oa_median(samples);
    std::vector<double> deviations;
    for (const double s : samples) {
        deviations.push_back(std::fabs(s - middle));
    }
    return oa_median(deviations);
}

// The standard error of the median of two samples or more that are spread normally.
double error_of(const std::vector<double> & samples) {
    const auto [least, most] = std::minmax_element(samples.begin(), samples.end());
    const size_t n           = samples.size();
    const double sigma = n < range_of_few.size() ? (*most - *least) / range_of_few[n] : 1.483 * spread_of(samples);
    return 1.253 * sigma / std::sqrt(double(n));
}

std::vector<double> faster_half(std::vector<double> samples) {
    std::sort(samples.begin(), samples.end());
    samples.resize((samples.size() + 1) / 2);
    return samples;
}

oa_timing summarise(const std::vector<double> & samples, double clean) {
    return { oa_median(samples), *std::min_element(samples.begin(), samples.end()), spread_of(samples),
             int(samples.size()), clean };
}

} // namespace

oa_timing oa_measure(const std::function<void()> & once, double divisor, int min_repeats, double min_s, double max_s,
                     oa_patience & patience, const std::function<void()> & before) {
    using clock = std::chrono::steady_clock;
    once();

    const double begin_others = oa_others_s(patience.has_servers);
    const auto   begin        = clock::now();
    const auto   seconds_from = [](clock::time_point t) {
        return std::chrono::duration<double>(clock::now() - t).count();
    };
    // Where hardly anything is measured, nothing is waited for.
    const bool          waits     = min_s > 0.0 && max_s >= min_s;
    const double        longest_s = !waits              ? max_s :
                                    patience.left_s > 0 ? std::min(longest * max_s, max_s + patience.left_s) :
                                                          std::max(shortest * max_s, min_s);
    double              next_s    = look_s; // when others' CPU time is read
    std::vector<double> clean, all;
    double              total = 0.0, clean_total = 0.0;
    while (true) {
        before();
        const double waited = oa_waited_s();
        const auto   start  = clock::now();
        once();
        const double seconds = seconds_from(start);
        total += seconds;
        all.push_back(seconds / divisor);
        if (oa_waited_s() - waited <= undisturbed * seconds) {
            clean_total += seconds;
            clean.push_back(seconds / divisor);
        }
        // A device whose own threads share the CPUs with ours (a server on loopback) waits on a quiet machine, too.
        const bool   last   = int(all.size()) >= max_samples;
        const double passed = seconds_from(begin);
        if (clean.size() < all.size() && (passed >= next_s || total >= longest_s || last)) {
            next_s = 2.0 * passed;
            if (oa_others_s(patience.has_servers) - begin_others <= ticks_s + quiet_cpus * passed) {
                clean       = all;
                clean_total = total;
            }
        }
        const bool enough = int(clean.size()) >= min_repeats;
        const bool usable = enough || clean.size() == all.size();
        const bool steady = enough && clean_total >= min_s && error_of(clean) <= known * oa_median(clean);
        if (steady || total >= (usable ? max_s : longest_s) || last) {
            patience.left_s -= std::max(0.0, total - max_s);
            return summarise(usable ? clean : faster_half(all), double(clean.size()) / double(all.size()));
        }
    }
}
