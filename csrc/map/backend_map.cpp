#include "backend_map.h"

#include "ggml-backend.h"
#include "host_memory.h"
#include "llama-impl.h"
#include "stream_source.h"
#include "tensor_flags.h"

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <map>
#include <memory>
#include <set>
#include <sstream>
#include <stdexcept>

namespace {

constexpr const char * header          = "# oallama backend map v1";
constexpr const char * tied_output     = "output.weight";
constexpr const char * table_variable  = "OALLAMA_BACKEND_MAP";
constexpr const char * token_embedding = "token_embd.weight";
constexpr int          max_slots       = 64;

struct tensor_entry {
    std::string device;
    bool        host;        // computed on the CPU, never uploaded
    int         stream_from; // tokens from which it is streamed; 0: never
    std::string realisation; // "plain", "repacked"; empty: llama.cpp's own choice
};

struct segment_entry {
    std::string device;
    bool        columns;
    int64_t     count;
};

struct backend_map {
    std::map<int, std::string>           layers;
    std::map<std::string, tensor_entry>  tensors;
    std::map<std::string, segment_entry> segments;
    int                                  slots          = 3; // one is read, one is full, one is being filled
    bool                                 stream_caches  = false;
    bool                                 offline_arenas = false;
};

// What one load has asked for so far.
struct load_state {
    std::shared_ptr<const backend_map> map;
    int                                n_layer = -1;
    std::set<std::string>              seen, divided;
    std::string                        weight;         // asked for last
    std::string                        realisation;    // of it
    size_t                             repackable = 0; // bytes of host memory that repacked weights may still take
};

thread_local std::shared_ptr<const backend_map> t_map;
thread_local load_state                         t_load;
thread_local std::string                        t_error;
thread_local size_t                             t_left_mapped = 0; // by the last load, bytes

[[noreturn]] void fail(const std::string & message) {
    t_error = "backend map: " + message;
    t_load  = {};
    throw std::runtime_error(t_error);
}

std::shared_ptr<const backend_map> parse(const std::string & table) {
    auto               map = std::make_shared<backend_map>();
    std::istringstream lines(table);
    std::string        line;
    int                number = 0;

    const auto bad = [&](const std::string & why) {
        return std::invalid_argument("backend map, line " + std::to_string(number) + ": " + why + ": '" + line + "'");
    };
    while (std::getline(lines, line)) {
        ++number;
        if (number == 1 && line != header) {
            throw bad(std::string("expected '") + header + "'");
        }
        if (line.empty() || line[0] == '#') {
            continue;
        }
        std::istringstream fields(line);
        std::string        kind, name, device, mode, rest;
        int                from = 0;
        fields >> kind >> name >> device;
        if (kind == "layer") {
            char *     end = nullptr;
            const long il  = std::strtol(name.c_str(), &end, 10);
            if (name.empty() || *end != '\0' || il < 0 || device.empty() || fields >> rest) {
                throw bad("expected 'layer <number> <device>'");
            }
            if (!map->layers.emplace(int(il), device).second) {
                throw bad("layer listed twice");
            }
        } else if (kind == "tensor") {
            fields >> mode;
            std::string realisation;
            const bool  known = mode == "resident" || mode == "host" || mode == "upload";
            if (mode == "stream" && !(fields >> from && from >= 1)) {
                throw bad("expected 'stream <tokens>', 1 or more");
            }
            fields >> realisation;
            const bool fits = realisation.empty() || realisation == "plain" || realisation == "repacked";
            if (device.empty() || (!known && mode != "stream") || !fits || fields >> rest) {
                throw bad("expected 'tensor <name> <device> resident|host|upload|stream <tokens> [plain|repacked]'");
            }
            if (!realisation.empty() && mode == "resident") {
                throw bad("a resident weight has no realisation");
            }
            if (!map->tensors.emplace(name, tensor_entry{ device, mode == "host", from, realisation }).second) {
                throw bad("tensor listed twice");
            }
        } else if (kind == "segment") {
            long long count = 0;
            fields >> mode;
            if ((mode != "rows" && mode != "columns") || !(fields >> count) || count < 1 || fields >> rest) {
                throw bad("expected 'segment <name> <device> rows|columns <number>', 1 or more");
            }
            if (!map->segments.emplace(name, segment_entry{ device, mode == "columns", count }).second) {
                throw bad("segment listed twice");
            }
        } else if (kind == "slots") {
            char * end = nullptr;
            map->slots = int(std::strtol(name.c_str(), &end, 10));
            if (name.empty() || *end != '\0' || map->slots < 2 || map->slots > max_slots || !device.empty()) {
                throw bad("expected 'slots <number>', 2 to " + std::to_string(max_slots));
            }
        } else if (kind == "caches") {
            map->stream_caches = true;
            if (name != "stream" || !device.empty()) {
                throw bad("expected 'caches stream'");
            }
        } else if (kind == "arenas") {
            map->offline_arenas = true;
            if (name != "offline" || !device.empty()) {
                throw bad("expected 'arenas offline'");
            }
        } else {
            throw bad("expected 'layer', 'tensor', 'segment', 'slots', 'caches' or 'arenas'");
        }
    }
    if (number == 0) {
        throw std::invalid_argument("backend map: empty table");
    }
    for (const auto & [name, tensor] : map->tensors) {
        const bool uploads = !tensor.host && tensor.stream_from == 0;
        if (uploads && tensor.realisation == "repacked" && map->segments.count(name) == 0) {
            throw std::invalid_argument("backend map: '" + name + "' may be uploaded, so it is plain");
        }
    }
    for (const auto & [name, segment] : map->segments) {
        if (map->tensors.count(name) == 0) {
            throw std::invalid_argument("backend map: a segment of '" + name + "', which has no line 'tensor'");
        }
    }
    return map;
}

std::shared_ptr<const backend_map> from_environment() {
    const char * path = std::getenv(table_variable);
    if (path == nullptr || *path == '\0') {
        return nullptr;
    }
    std::ifstream file(path);
    if (!file) {
        fail(std::string(table_variable) + " names a file that cannot be read: " + path);
    }
    std::stringstream text;
    text << file.rdbuf();
    try {
        return parse(text.str());
    } catch (const std::invalid_argument & err) {
        fail(std::string(path) + ": " + err.what());
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

const tensor_entry & find_tensor(const std::string & name) {
    const auto it = t_load.map->tensors.find(name);
    if (it == t_load.map->tensors.end()) {
        fail("the table has no entry for the model's tensor '" + name + "' (is it a plan for another model?)");
    }
    return it->second;
}

} // namespace

void oa_backend_map_set(const std::string & table) {
    t_error.clear();
    t_map = parse(table);
}

void oa_backend_map_clear() {
    t_map  = nullptr;
    t_load = {};
}

std::string oa_backend_map_error() {
    return t_error;
}

size_t oa_backend_map_left_mapped() {
    return t_left_mapped;
}

void oa_backend_map_begin() {
    t_error.clear();
    t_load     = {};
    t_load.map = t_map ? t_map : from_environment();
    // The rest is for KV caches, compute buffers and everybody else.
    const size_t memory = oa_host_memory();
    t_load.repackable   = memory - std::max(memory / 8, std::min(memory / 2, size_t(512) << 20));
    t_left_mapped       = 0;
}

ggml_backend_dev_t oa_backend_map_layer(int il, int n_layer) {
    if (!t_load.map) {
        return nullptr;
    }
    t_load.n_layer = n_layer;
    const auto it  = t_load.map->layers.find(il);
    if (it == t_load.map->layers.end()) {
        fail("the table has no entry for layer " + std::to_string(il) + " (layers 0.." + std::to_string(n_layer) +
             " are expected, the last one being the output)");
    }
    return find_device(it->second);
}

ggml_backend_dev_t oa_backend_map_tensor(const std::string & name, bool tied, int copy_of) {
    if (!t_load.map) {
        return nullptr;
    }
    const std::string key = tied ? tied_output : name;
    t_load.seen.insert(key);
    const tensor_entry & entry = find_tensor(key);
    t_load.weight              = key;
    t_load.realisation         = entry.realisation;
    if (entry.stream_from && ggml_backend_dev_type(find_device(entry.device)) != GGML_BACKEND_DEVICE_TYPE_CPU) {
        fail("'" + key + "' is streamed from '" + entry.device + "'; streamed weights live on the CPU");
    }
    return copy_of >= 0 ? oa_backend_map_layer(copy_of, t_load.n_layer) : find_device(entry.device);
}

oa_buft_list oa_backend_map_realised(const oa_buft_list & list) {
    if (t_load.realisation.empty()) {
        return list;
    }
    oa_buft_list kept;
    std::copy_if(list.begin(), list.end(), std::back_inserter(kept), [](const auto & entry) {
        return ggml_backend_buft_is_host(entry.second) == (t_load.realisation == "plain");
    });
    if (kept.empty()) {
        fail("'" + t_load.weight + "' is to be repacked, and this load has no buffer type for that");
    }
    return kept;
}

ggml_backend_buffer_type_t oa_backend_map_host_buft(ggml_backend_buffer_type_t buft, const ggml_tensor * weight,
                                                    bool mapped) {
    if (ggml_backend_buft_is_host(buft)) {
        return buft;
    }
    if (t_load.map->segments.count(weight->name)) {
        return ggml_backend_cpu_buffer_type(); // its parts are what is computed
    }
    const size_t nbytes = ggml_nbytes(weight);
    if (!mapped || nbytes <= t_load.repackable) {
        t_load.repackable -= std::min(nbytes, t_load.repackable);
        return buft;
    }
    t_left_mapped += nbytes;
    return ggml_backend_cpu_buffer_type();
}

oa_segment oa_backend_map_segment(const ggml_tensor * weight, bool tied) {
    const auto * map = t_load.map.get();
    const auto   it  = map && !tied ? map->segments.find(weight->name) : decltype(map->segments.find("")){};
    if (!map || tied || it == map->segments.end()) {
        return {};
    }
    const auto & [device, columns, count] = it->second;
    const ggml_backend_dev_t dev          = find_device(device);
    if (ggml_backend_dev_type(dev) == GGML_BACKEND_DEVICE_TYPE_CPU) {
        fail("a segment of '" + it->first + "' is to live on '" + device + "', where the weight lives");
    }
    if (ggml_backend_dev_type(find_device(find_tensor(it->first).device)) != GGML_BACKEND_DEVICE_TYPE_CPU) {
        fail("a segment of '" + it->first + "', which does not live on the CPU");
    }
    t_load.divided.insert(it->first);
    return { dev, columns, count };
}

bool oa_backend_map_part(ggml_backend_buffer_type_t buft, const ggml_tensor * weight, const ggml_tensor * part,
                         ggml_backend_dev_t dev, bool mapped) {
    if (dev) {
        oa_backend_map_require(buft != nullptr, weight->name, dev);
        return true;
    }
    // Beside a weight that is read from the file into memory a copy of its part would be memory twice.
    const size_t nbytes = ggml_nbytes(part);
    if (!buft || ggml_backend_buft_is_host(buft) || !mapped || nbytes > t_load.repackable) {
        return false;
    }
    t_load.repackable -= nbytes;
    return true;
}

void oa_backend_map_mark(ggml_tensor * tensor, bool tied, int fd, size_t offset) {
    if (!t_load.map) {
        return;
    }
    const tensor_entry & entry = find_tensor(tied ? tied_output : tensor->name);
    tensor->flags |= OA_TENSOR_FLAG_MAPPED;
    if (t_load.map->offline_arenas) {
        tensor->flags |= OA_TENSOR_FLAG_ARENAS_OFFLINE;
    }
    if (entry.host) {
        tensor->flags |= OA_TENSOR_FLAG_HOST;
    }
    if (entry.stream_from) {
        // An embedding that is the output matrix, too, may be marked already; its rows are fetched on the host either
        // way.
        tensor->flags &= ~OA_TENSOR_FLAG_HOST;
        tensor->flags |= OA_TENSOR_FLAG_STREAM;
        OA_STREAM_FROM(tensor)  = entry.stream_from;
        OA_STREAM_SLOTS(tensor) = t_load.map->slots;
        if (fd >= 0) {
            oa_stream_source_set(tensor, fd, offset);
        }
    }
    if (t_load.map->stream_caches && std::string(tensor->name) == token_embedding) {
        tensor->flags |= OA_TENSOR_FLAG_STREAMS_CACHES;
    }
}

bool oa_backend_map_obeyed(const ggml_tensor * weight) {
    return weight != nullptr && (weight->flags & OA_TENSOR_FLAG_MAPPED) != 0;
}

void oa_backend_map_mark_cache(const ggml_tensor * embedding, ggml_backend_buffer_type_t buft, ggml_tensor * k,
                               ggml_tensor * v) {
    if (!oa_backend_map_obeyed(embedding)) {
        return;
    }
    const bool streams = (embedding->flags & OA_TENSOR_FLAG_STREAMS_CACHES) && ggml_backend_buft_is_host(buft);
    for (ggml_tensor * cache : { k, v }) {
        if (cache) {
            cache->flags |= OA_TENSOR_FLAG_CACHE | (streams ? OA_TENSOR_FLAG_STREAM : 0);
        }
    }
}

void oa_backend_map_require(bool ok, const std::string & what, ggml_backend_dev_t dev) {
    if (!ok && !t_load.realisation.empty()) {
        fail("'" + what + "' cannot be repacked: the CPU has no faster layout for its type, shape or operator");
    }
    if (!ok) {
        fail("device '" + std::string(ggml_backend_dev_name(dev)) + "' cannot take " + what +
             " (it is not among the model's devices or does not support the operator)");
    }
}

void oa_backend_map_done() {
    if (!t_load.map) {
        return;
    }
    for (const auto & [name, entry] : t_load.map->tensors) {
        if (t_load.seen.count(name) == 0) {
            fail("the model has no tensor '" + name + "' (is it a plan for another model?)");
        }
    }
    for (const auto & [name, entry] : t_load.map->segments) {
        if (t_load.divided.count(name) == 0) {
            fail("'" + name + "' cannot be divided: it is the token embedding, too");
        }
    }
    if (t_left_mapped > 0) {
        LLAMA_LOG_WARN("%zu MiB of weights on the CPU stay in the mapped file: memory is short\n", t_left_mapped >> 20);
    }
    if (t_load.map->layers.rbegin()->first > t_load.n_layer) {
        fail("the model has no layer " + std::to_string(t_load.map->layers.rbegin()->first));
    }
    t_load = {};
}
