// The entry point of this library, which ggml loads as a backend (ggml_backend_load, or GGML_BACKEND_PATH for
// llama.cpp's programs). The environment says what this rank is:
//   OALLAMA_RANK_DEVICE   the ggml device it computes on; default CPU
//   OALLAMA_RANK_THREADS  threads of all ranks, separated by commas, or one number for all; default the backend's
//   OALLAMA_RANK_HOST     id of its host; default the host's name
//   OALLAMA_RANK_SPEEDS   of all ranks, separated by commas: the fastest of a host speaks for it; default all alike
//   OALLAMA_RANK_TIMEOUT  seconds until a rank that others wait for is given up (loading: ten times that); default 60
//   OALLAMA_ALLREDUCE     auto (default), star, tree, exchange, rabenseifner or pipelined
//   OALLAMA_RANK_MEMORY   resident (default) or minimal: weights in a file, few of them in memory; on the CPU only
//   OALLAMA_RANK_FOLDER   where that file lies; default /var/tmp
//   OALLAMA_RANK_SHARING  ranks that share a host's memory, for all ranks; default: it has room for all weights
//   OALLAMA_WIRE          native (default) or q8: what travels between hosts
//   OALLAMA_RANK_SUMS     device (default): in the GPU's memory if it is CUDA and all ranks can; or host
#include "operation.h"
#include "rank_comm.h"
#include "rank_device.h"
#include "ranks.h"
#include "weight_window.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

oa_rank_hooks                   g_hooks;
std::vector<ggml_backend_dev_t> g_devices;

std::string variable(const char * name, const char * missing) {
    const char * text = std::getenv(name);
    return text && *text ? text : missing;
}

std::vector<double> numbers(const char * name) {
    std::istringstream  text(variable(name, ""));
    std::vector<double> values;
    for (std::string word; std::getline(text, word, ',');) {
        values.push_back(std::atof(word.c_str()));
    }
    return values;
}

oa_algorithm algorithm() {
    const std::string text = variable("OALLAMA_ALLREDUCE", oa_algorithm_name(OA_AUTO));
    for (int i = OA_AUTO; i <= OA_PIPELINED; ++i) {
        if (text == oa_algorithm_name(i)) {
            return oa_algorithm(i);
        }
    }
    throw std::runtime_error("OALLAMA_ALLREDUCE names no algorithm: " + text);
}

oa_wire_format wire() {
    const std::string text = variable("OALLAMA_WIRE", "native");
    if (text != "native" && text != "q8") {
        throw std::runtime_error("OALLAMA_WIRE is neither native nor q8: " + text);
    }
    return text == "q8" ? OA_WIRE_Q8 : OA_WIRE_NATIVE;
}

bool is_minimal(ggml_backend_dev_t own) {
    const std::string text = variable("OALLAMA_RANK_MEMORY", "resident");
    if (text != "resident" && text != "minimal") {
        throw std::runtime_error("OALLAMA_RANK_MEMORY is neither resident nor minimal: " + text);
    }
    if (text == "minimal" && ggml_backend_dev_type(own) != GGML_BACKEND_DEVICE_TYPE_CPU) {
        throw std::runtime_error("minimal memory is for ranks that compute on the CPU");
    }
    if (text == "minimal") {
        oa_window_check();
    }
    return text == "minimal";
}

// The PCI address of a CUDA device whose memory sums are to be made in.
std::string cuda_device(ggml_backend_dev_t own) {
    const std::string where = variable("OALLAMA_RANK_SUMS", "device");
    if (where != "device" && where != "host") {
        throw std::runtime_error("OALLAMA_RANK_SUMS is neither device nor host: " + where);
    }
    if (where == "host" || std::strcmp(ggml_backend_reg_name(ggml_backend_dev_backend_reg(own)), "CUDA") != 0) {
        return "";
    }
    ggml_backend_dev_props props;
    ggml_backend_dev_get_props(own, &props);
    return props.device_id ? props.device_id : "";
}

void start() {
    const std::string  name = variable("OALLAMA_RANK_DEVICE", "CPU");
    ggml_backend_dev_t own  = ggml_backend_dev_by_name(name.c_str());
    if (!own) {
        throw std::runtime_error("OALLAMA_RANK_DEVICE names no device here: " + name);
    }
    const bool            minimal = is_minimal(own);
    oa_rank_comm_settings settings;
    settings.host        = variable("OALLAMA_RANK_HOST", "");
    settings.timeout     = std::atof(variable("OALLAMA_RANK_TIMEOUT", "60").c_str());
    settings.speeds      = numbers("OALLAMA_RANK_SPEEDS");
    settings.algorithm   = algorithm();
    settings.wire        = wire();
    settings.cuda_device = cuda_device(own);
    int rank = 0, n_ranks = 0;
    oa_rank_comm_start(settings, rank, n_ranks);
    if (const auto sharing = numbers("OALLAMA_RANK_SHARING"); !sharing.empty()) {
        oa_window_share(int(sharing[size_t(rank) % sharing.size()]));
    }
    const auto threads   = numbers("OALLAMA_RANK_THREADS");
    const int  n_threads = threads.empty() ? 0 : int(threads[size_t(rank) % threads.size()]);
    oa_rank_devices_make(rank, n_ranks, own, n_threads, minimal);
    for (size_t i = 0; i < ggml_backend_reg_dev_count(oa_rank_reg()); ++i) {
        g_devices.push_back(ggml_backend_reg_dev_get(oa_rank_reg(), i));
    }
    g_devices.push_back(nullptr);
    g_hooks = { rank, n_ranks, g_devices.data(), oa_rank_broadcast, oa_rank_all_ok, oa_rank_gather, oa_rank_error };
    oa_ranks_set(&g_hooks);
    std::atexit(oa_rank_comm_end);
}

} // namespace

extern "C" __attribute__((visibility("default"))) ggml_backend_reg_t ggml_backend_init() {
    if (oa_rank_count() == 0) {
        try {
            start();
        } catch (const std::exception & error) {
            std::fprintf(stderr, "oallama: this process cannot be a rank: %s\n", error.what());
            return nullptr;
        }
    }
    return oa_rank_reg();
}
