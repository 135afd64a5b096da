#include "bench_backend.h"

#include "ggml-backend-impl.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <stdexcept>

constexpr int    max_samples = 500;
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

oa_timing summarise(const std::vector<double> & samples) {
    const double        middle = median_of(samples);
    std::vector<double> deviations;
    for (const double s : samples) {
        deviations.push_back(std::fabs(s - middle));
    }
    return { middle, *std::min_element(samples.begin(), samples.end()), median_of(deviations), int(samples.size()) };
}

} // namespace

oa_timing oa_measure(const std::function<void()> & once, double divisor, int min_repeats, double min_s, double max_s,
                     const std::function<void()> & before) {
    using clock = std::chrono::steady_clock;
    once();

    std::vector<double> samples;
    double              total = 0.0;
    while (true) {
        before();
        const auto start = clock::now();
        once();
        const double seconds = std::chrono::duration<double>(clock::now() - start).count();
        total += seconds;
        samples.push_back(seconds / divisor);
        const oa_timing result = summarise(samples);
        const bool more = result.repeats < min_repeats || total < min_s || result.spread_s > calm * result.median_s;
        if (!more || total >= max_s || result.repeats >= max_samples) {
            return result;
        }
    }
}
