// The entry point of this library, which ggml loads as a backend (ggml_backend_load, or GGML_BACKEND_PATH for
// llama.cpp's programs). The environment says what this rank is:
//   OALLAMA_RANK_DEVICE   the ggml device it computes on; default CPU
//   OALLAMA_RANK_THREADS  its threads; default the backend's
//   OALLAMA_RANK_HOST     id of its host; default the host's name
//   OALLAMA_RANK_TIMEOUT  seconds until a rank that does nothing is given up; default 60
//   OALLAMA_ALLREDUCE     auto (default), star, tree, exchange, rabenseifner or pipelined
//   OALLAMA_WIRE          native (default) or q8: what travels between hosts
#include "rank_comm.h"
#include "rank_device.h"
#include "ranks.h"

#include <cstdio>
#include <cstdlib>
#include <initializer_list>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace {

oa_rank_hooks                   g_hooks;
std::vector<ggml_backend_dev_t> g_devices;

std::string variable(const char * name, const char * missing) {
    const char * text = std::getenv(name);
    return text && *text ? text : missing;
}

// The value whose name the variable holds; the first one is the default.
template <typename T> T choice(const char * name, std::initializer_list<std::pair<const char *, T>> values) {
    const std::string text = variable(name, values.begin()->first);
    for (const auto & [word, value] : values) {
        if (text == word) {
            return value;
        }
    }
    throw std::runtime_error(std::string(name) + " has no choice '" + text + "'");
}

void start() {
    const std::string  name = variable("OALLAMA_RANK_DEVICE", "CPU");
    ggml_backend_dev_t own  = ggml_backend_dev_by_name(name.c_str());
    if (!own) {
        throw std::runtime_error("OALLAMA_RANK_DEVICE names no device here: " + name);
    }
    oa_rank_comm_settings settings;
    settings.host      = variable("OALLAMA_RANK_HOST", "");
    settings.timeout   = std::atof(variable("OALLAMA_RANK_TIMEOUT", "60").c_str());
    settings.algorithm = choice<oa_algorithm>("OALLAMA_ALLREDUCE", { { "auto", OA_AUTO },
                                                                     { "star", OA_STAR },
                                                                     { "tree", OA_TREE },
                                                                     { "exchange", OA_EXCHANGE },
                                                                     { "rabenseifner", OA_RABENSEIFNER },
                                                                     { "pipelined", OA_PIPELINED } });
    settings.wire      = choice<oa_wire_format>("OALLAMA_WIRE", { { "native", OA_WIRE_NATIVE }, { "q8", OA_WIRE_Q8 } });
    int rank = 0, n_ranks = 0;
    oa_rank_comm_start(settings, rank, n_ranks);
    oa_rank_devices_make(rank, n_ranks, own, std::atoi(variable("OALLAMA_RANK_THREADS", "0").c_str()));
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
