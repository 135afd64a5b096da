#include "tuned_limits.h"

#include "ggml-impl.h"

#include <atomic>
#include <cstdlib>
#include <mutex>
#include <sstream>
#include <stdexcept>
#include <vector>

namespace {

constexpr int  n_devices = 16; // GGML_CUDA_MAX_DEVICES
constexpr auto variable  = "OALLAMA_MMVQ_LIMITS";

std::atomic<int8_t> g_limits[n_devices][GGML_TYPE_COUNT];
std::once_flag      g_environment;

struct entry {
    int device, type, limit;
};

[[noreturn]] void bad(const std::string & what, const std::string & expected) {
    throw std::invalid_argument("mmvq limit: " + what + ", expected " + expected);
}

int number(const std::string & text, const std::string & expected) {
    char *     end   = nullptr;
    const long value = std::strtol(text.c_str(), &end, 10);
    if (text.empty() || *end != '\0' || value < 0 || value > 127) {
        bad("'" + text + "'", expected);
    }
    return int(value);
}

entry checked(const std::string & device, const std::string & type, int limit) {
    if (device.rfind("CUDA", 0) != 0) {
        bad("device '" + device + "'", "CUDA0 to CUDA" + std::to_string(n_devices - 1));
    }
    const int id = number(device.substr(4), "CUDA0 to CUDA" + std::to_string(n_devices - 1));
    if (id >= n_devices) {
        bad("device '" + device + "'", "CUDA0 to CUDA" + std::to_string(n_devices - 1));
    }
    if (limit < 0 || limit > oa_most_mmvq_columns) {
        bad(std::to_string(limit) + " columns", "0 to " + std::to_string(oa_most_mmvq_columns));
    }
    for (int t = 0; t < GGML_TYPE_COUNT; ++t) {
        if (ggml_is_quantized(ggml_type(t)) && type == ggml_type_name(ggml_type(t))) {
            return { id, t, limit };
        }
    }
    bad("type '" + type + "'", "a quantised type as q4_K");
}

void set(const entry & e) {
    g_limits[e.device][e.type] = int8_t(e.limit);
}

std::vector<entry> parse(const std::string & text) {
    std::vector<entry> found;
    std::istringstream devices(text);
    for (std::string part; std::getline(devices, part, ';');) {
        const size_t       colon = part.find(':');
        std::istringstream types(colon == std::string::npos ? "" : part.substr(colon + 1));
        size_t             n = found.size();
        for (std::string item; std::getline(types, item, ',');) {
            const size_t equals = item.find('=');
            if (equals == std::string::npos) {
                bad("'" + item + "'", "type=columns");
            }
            const int limit = number(item.substr(equals + 1), "a number of columns");
            found.push_back(checked(part.substr(0, colon), item.substr(0, equals), limit));
        }
        if (found.size() == n) {
            bad("'" + part + "'", "DEVICE:type=columns,..");
        }
    }
    return found;
}

void read_environment() {
    const char * text = std::getenv(variable);
    if (text == nullptr || *text == '\0') {
        return;
    }
    try {
        for (const entry & e : parse(text)) {
            set(e);
        }
    } catch (const std::invalid_argument & err) {
        GGML_LOG_ERROR("%s is ignored: %s\n", variable, err.what());
    }
}

} // namespace

int oa_tuned_mmvq_limit(ggml_type type, int device) {
    std::call_once(g_environment, read_environment);
    return device >= 0 && device < n_devices ? g_limits[device][type].load() : 0;
}

void oa_tuned_set_mmvq_limit(const std::string & device, const std::string & type, int limit) {
    std::call_once(g_environment, read_environment);
    set(checked(device, type, limit));
}

void oa_tuned_set_mmvq_limits(const std::string & text) {
    std::call_once(g_environment, read_environment);
    for (const entry & e : parse(text)) {
        set(e);
    }
}
