// The entry point of this library, which ggml loads as a backend (ggml_backend_load, or GGML_BACKEND_PATH for
// llama.cpp's programs). The environment says what this rank is:
//   OALLAMA_RANK_DEVICE   the ggml device it computes on; default CPU
//   OALLAMA_RANK_THREADS  its threads; default the backend's
#include "rank_comm.h"
#include "rank_device.h"
#include "ranks.h"

#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

oa_rank_hooks                   g_hooks;
std::vector<ggml_backend_dev_t> g_devices;

void start() {
    const char *       name = std::getenv("OALLAMA_RANK_DEVICE");
    ggml_backend_dev_t own  = ggml_backend_dev_by_name(name && *name ? name : "CPU");
    if (!own) {
        throw std::runtime_error(std::string("OALLAMA_RANK_DEVICE names no device here: ") + name);
    }
    const char * threads = std::getenv("OALLAMA_RANK_THREADS");
    int          rank = 0, n_ranks = 0;
    oa_rank_comm_start(rank, n_ranks);
    oa_rank_devices_make(rank, n_ranks, own, threads ? std::atoi(threads) : 0);
    for (size_t i = 0; i < ggml_backend_reg_dev_count(oa_rank_reg()); ++i) {
        g_devices.push_back(ggml_backend_reg_dev_get(oa_rank_reg(), i));
    }
    g_devices.push_back(nullptr);
    g_hooks = { rank, n_ranks, g_devices.data(), oa_rank_broadcast, oa_rank_all_ok, oa_rank_gather };
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
