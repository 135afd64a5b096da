#include "backend_map.h"

#include "ggml-backend.h"
#include "host_weights.h"
#include "llama-impl.h"
#include "parts.h"
#include "tensor_flags.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <memory>
#include <set>
#include <sstream>
#include <stdexcept>
#include <vector>

namespace {

constexpr const char * tied_output    = "output.weight";
constexpr const char * table_variable = "OALLAMA_BACKEND_MAP";

using table_ptr = std::shared_ptr<const oa_backend_table>;

// What one load has asked for so far.
struct load_state {
    table_ptr             table;
    int                   n_layer = -1;
    std::set<std::string> seen, divided;
};

thread_local table_ptr   t_table;
thread_local load_state  t_load;
thread_local std::string t_error;

[[noreturn]] void fail(const std::string & message) {
    t_error = "backend map: " + message;
    t_load  = {};
    throw std::runtime_error(t_error);
}

table_ptr parse(const std::string & text) {
    return std::make_shared<const oa_backend_table>(oa_backend_table_parse(text));
}

// Several tables, separated by ':', are for loads that follow each other: a model, its draft, and both again.
std::string next_path(const char * paths) {
    static std::atomic<size_t> loads{ 0 };
    std::vector<std::string>   each;
    std::stringstream          text(paths);
    for (std::string path; std::getline(text, path, ':');) {
        each.push_back(path);
    }
    return each[loads++ % each.size()];
}

table_ptr from_environment() {
    const char * paths = std::getenv(table_variable);
    if (paths == nullptr || *paths == '\0') {
        return nullptr;
    }
    const std::string path = next_path(paths);
    std::ifstream     file(path);
    if (!file) {
        fail(std::string(table_variable) + " names a file that cannot be read: " + path);
    }
    std::stringstream text;
    text << file.rdbuf();
    try {
        return parse(text.str());
    } catch (const std::invalid_argument & err) {
        fail(path + ": " + err.what());
    }
}

ggml_backend_dev_t find_device(const std::string & name) {
    ggml_backend_dev_t dev = ggml_backend_dev_by_name(name.c_str());
    if (dev == nullptr) {
        std::string known;
        for (size_t i = 0; i < ggml_backend_dev_count(); ++i) {
            known += (i ? ", " : "") + std::string(ggml_backend_dev_name(ggml_backend_dev_get(i)));
        }
        fail("unknown device '" + name + "' (devices here: " + known + ")");
    }
    return dev;
}

bool is_cpu(ggml_backend_dev_t dev) {
    return ggml_backend_dev_type(dev) == GGML_BACKEND_DEVICE_TYPE_CPU;
}

// Layers with slots on a device.
int n_slot_layers(const std::string & device) {
    std::set<int> layers;
    for (const auto & [name, segment] : t_load.table->segments) {
        if (segment.part.slots > 0 && segment.device == device) {
            layers.insert(oa_layer_of(name));
        }
    }
    return int(layers.size());
}

oa_segment find_segment(const std::string & name, ggml_backend_dev_t home) {
    const auto it = t_load.table->segments.find(name);
    if (it == t_load.table->segments.end()) {
        return {};
    }
    const std::string &      device = it->second.device;
    const ggml_backend_dev_t dev    = find_device(device);
    if (is_cpu(dev)) {
        fail("a segment of '" + name + "' is to live on '" + device + "', where the weight lives");
    }
    if (!is_cpu(home)) {
        fail("a segment of '" + name + "', which does not live on the CPU");
    }
    t_load.divided.insert(name);
    return { dev, it->second.part, t_load.table->options.uploads, it->second.part.slots ? n_slot_layers(device) : 0 };
}

} // namespace

void oa_backend_map_set(const std::string & table) {
    t_error.clear();
    t_table = parse(table);
}

void oa_backend_map_clear() {
    t_table = nullptr;
    t_load  = {};
}

std::string oa_backend_map_error() {
    return t_error;
}

void oa_backend_map_begin() {
    t_error.clear();
    t_load       = {};
    t_load.table = t_table ? t_table : from_environment();
    oa_host_weights_begin();
}

ggml_backend_dev_t oa_backend_map_layer(int il, int n_layer) {
    if (!t_load.table) {
        return nullptr;
    }
    t_load.n_layer = n_layer;
    const auto it  = t_load.table->layers.find(il);
    if (it == t_load.table->layers.end()) {
        fail("the table has no entry for layer " + std::to_string(il) + " (layers 0.." + std::to_string(n_layer) +
             " are expected, the last one being the output)");
    }
    return find_device(it->second);
}

oa_weight_place oa_backend_map_weight(const std::string & name, bool tied, int copy_of) {
    oa_weight_place place;
    if (!t_load.table) {
        return place;
    }
    place.name    = tied ? tied_output : name;
    const auto it = t_load.table->weights.find(place.name);
    if (it == t_load.table->weights.end()) {
        fail("the table has no entry for the model's tensor '" + place.name + "' (is it a plan for another model?)");
    }
    t_load.seen.insert(place.name);
    const oa_table_weight &  entry  = it->second;
    const ggml_backend_dev_t device = find_device(entry.device);
    if (entry.stream_from && !is_cpu(device)) {
        fail("'" + place.name + "' is streamed from '" + entry.device + "'; streamed weights live on the CPU");
    }
    place.home        = copy_of >= 0 ? oa_backend_map_layer(copy_of, t_load.n_layer) : device;
    place.mode        = entry.mode;
    place.stream_from = entry.stream_from;
    place.realisation = entry.realisation;
    place.options     = t_load.table->options;
    if (!tied) {
        place.segment = find_segment(place.name, device);
    }
    return place;
}

oa_buft_list oa_backend_map_bufts(const oa_weight_place & place, ggml_backend_dev_t dev, const oa_buft_list & cpu) {
    if (dev && !is_cpu(dev)) {
        return { { dev, ggml_backend_dev_buffer_type(dev) } };
    }
    if (place.realisation == oa_realisation::any) {
        return cpu;
    }
    oa_buft_list kept;
    std::copy_if(cpu.begin(), cpu.end(), std::back_inserter(kept), [&](const auto & entry) {
        return ggml_backend_buft_is_host(entry.second) == (place.realisation != oa_realisation::repacked);
    });
    if (kept.empty()) {
        fail("'" + place.name + "' is to be repacked, and this load has no buffer type for that");
    }
    return kept;
}

ggml_backend_buffer_type_t oa_backend_map_buft(const oa_weight_place & place, ggml_backend_buffer_type_t chosen,
                                               const ggml_tensor * weight, bool mapped) {
    if (!chosen && place.realisation != oa_realisation::any) {
        fail("'" + place.name + "' cannot be repacked: the CPU has no faster layout for its type, shape or operator");
    }
    oa_backend_map_require(chosen != nullptr, weight->name, place.home);
    if (!is_cpu(place.home) || ggml_backend_buft_is_host(chosen)) {
        return chosen;
    }
    // Of a divided weight its parts are what is computed.
    const bool repacked = !place.segment.device && oa_host_weights_take(ggml_nbytes(weight), mapped);
    return repacked ? chosen : ggml_backend_cpu_buffer_type();
}

oa_buft_list oa_backend_map_twin_bufts(const oa_weight_place & place, const ggml_tensor * weight,
                                       const oa_buft_list & cpu) {
    oa_buft_list kept;
    if (place.home && is_cpu(place.home) && place.realisation == oa_realisation::twice &&
        !(weight->flags & OA_TENSOR_FLAG_LAZY) && !oa_twin(weight)) {
        std::copy_if(cpu.begin(), cpu.end(), std::back_inserter(kept),
                     [](const auto & entry) { return !ggml_backend_buft_is_host(entry.second); });
    }
    return kept;
}

bool oa_backend_map_twin(ggml_backend_buffer_type_t chosen, const ggml_tensor * weight, bool mapped) {
    if (!chosen) {
        LLAMA_LOG_WARN("backend map: '%s' is tiled alone: the CPU has no faster layout for it\n", weight->name);
    }
    return chosen && oa_host_weights_take_twin(ggml_nbytes(weight), mapped);
}

bool oa_backend_map_part(ggml_backend_buffer_type_t chosen, const ggml_tensor * weight, const ggml_tensor * part,
                         ggml_backend_dev_t dev, bool mapped) {
    if (dev) {
        oa_backend_map_require(chosen != nullptr, weight->name, dev);
        return true;
    }
    return chosen && !ggml_backend_buft_is_host(chosen) && oa_host_weights_take_part(ggml_nbytes(part), mapped);
}

void oa_backend_map_require(bool ok, const std::string & what, ggml_backend_dev_t dev) {
    if (!ok) {
        fail("device '" + std::string(ggml_backend_dev_name(dev)) + "' cannot take " + what +
             " (it is not among the model's devices or does not support the operator)");
    }
}

void oa_backend_map_done() {
    if (!t_load.table) {
        return;
    }
    for (const auto & [name, entry] : t_load.table->weights) {
        if (t_load.seen.count(name) == 0) {
            fail("the model has no tensor '" + name + "' (is it a plan for another model?)");
        }
    }
    for (const auto & [name, entry] : t_load.table->segments) {
        if (t_load.divided.count(name) == 0) {
            fail("'" + name + "' cannot be divided: it is the token embedding, too");
        }
    }
    if (const size_t left = oa_host_weights_left_mapped()) {
        LLAMA_LOG_WARN("%zu MiB of weights on the CPU stay in the mapped file: memory is short\n", left >> 20);
    }
    if (t_load.table->layers.rbegin()->first > t_load.n_layer) {
        fail("the model has no layer " + std::to_string(t_load.table->layers.rbegin()->first));
    }
    t_load = {};
}
