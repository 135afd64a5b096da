#include "rank_device.h"

#include "placeholder.h"
#include "rank_comm.h"
#include "weight_window.h"

#include <cstring>
#include <deque>
#include <string>

namespace {

struct rank_device {
    std::string         name;
    ggml_backend_dev_t  own; // the real device of this process
    bool                is_own;
    int                 n_threads;
    ggml_backend_device device;
};

std::deque<rank_device> g_devices;
int                     g_rank    = -1;
bool                    g_minimal = false;

const rank_device & of(ggml_backend_dev_t dev) {
    return *static_cast<rank_device *>(dev->context);
}

const char * get_name(ggml_backend_dev_t dev) {
    return of(dev).name.c_str();
}

const char * get_description(ggml_backend_dev_t dev) {
    return of(dev).is_own ? ggml_backend_dev_description(of(dev).own) : "device of another rank";
}

void get_memory(ggml_backend_dev_t dev, size_t * free, size_t * total) {
    *free = *total = 0;
    if (of(dev).is_own) {
        ggml_backend_dev_memory(of(dev).own, free, total);
    }
}

// Never the CPU's type: llama.cpp leaves CPUs out of tensor parallelism.
enum ggml_backend_dev_type get_type(ggml_backend_dev_t) {
    return GGML_BACKEND_DEVICE_TYPE_GPU;
}

void get_props(ggml_backend_dev_t dev, ggml_backend_dev_props * props) {
    *props             = {};
    props->name        = get_name(dev);
    props->description = get_description(dev);
    props->type        = get_type(dev);
    get_memory(dev, &props->memory_free, &props->memory_total);
    props->caps              = {};
    props->caps.mmap_support = true;
}

ggml_backend_buffer_type_t get_buffer_type(ggml_backend_dev_t dev) {
    ggml_backend_buffer_type_t real = ggml_backend_dev_buffer_type(of(dev).own);
    if (!of(dev).is_own) {
        return oa_placeholder_buffer_type(dev, real);
    }
    return g_minimal ? oa_window_buffer_type(dev, real) : real;
}

ggml_backend_t init_backend(ggml_backend_dev_t dev, const char * params) {
    const rank_device & d = of(dev);
    if (!d.is_own) {
        return oa_placeholder_backend(dev);
    }
    ggml_backend_t backend = ggml_backend_dev_init(d.own, params);
    if (backend && d.n_threads > 0) {
        ggml_backend_reg_t reg = ggml_backend_dev_backend_reg(d.own);
        const auto         set = reinterpret_cast<ggml_backend_set_n_threads_t>(
            ggml_backend_reg_get_proc_address(reg, "ggml_backend_set_n_threads"));
        if (set) {
            set(backend, d.n_threads);
        }
    }
    if (backend && g_minimal) {
        oa_window_watch(backend);
    }
    if (backend) {
        backend->device = dev; // llama.cpp asks the first backend's registry for the all-reduce: that must be ours
    }
    return backend;
}

bool supports_op(ggml_backend_dev_t dev, const ggml_tensor * op) {
    return ggml_backend_dev_supports_op(of(dev).own, op);
}

bool supports_buft(ggml_backend_dev_t dev, ggml_backend_buffer_type_t buft) {
    return buft == get_buffer_type(dev) || (of(dev).is_own && buft == ggml_backend_dev_buffer_type(of(dev).own));
}

constexpr ggml_backend_device_i device_interface = {
    get_name, get_description, get_memory,    get_type, get_props, init_backend, get_buffer_type, nullptr,
    nullptr,  supports_op,     supports_buft, nullptr,  nullptr,   nullptr,      nullptr,
};

// ---- registry ------------------------------------------------------------------------------------------------------

const char * reg_name(ggml_backend_reg_t) {
    return "ranks";
}

size_t reg_count(ggml_backend_reg_t) {
    return g_devices.size();
}

ggml_backend_dev_t reg_device(ggml_backend_reg_t, size_t index) {
    return &g_devices.at(index).device;
}

void * reg_address(ggml_backend_reg_t, const char * name) {
    if (std::strcmp(name, "ggml_backend_comm_init") == 0) {
        return reinterpret_cast<void *>(&oa_rank_comm_init);
    }
    if (std::strcmp(name, "ggml_backend_comm_allreduce_tensor") == 0) {
        return reinterpret_cast<void *>(&oa_rank_comm_allreduce);
    }
    if (std::strcmp(name, "ggml_backend_comm_free") == 0) {
        return reinterpret_cast<void *>(&oa_rank_comm_free);
    }
    return nullptr;
}

} // namespace

ggml_backend_reg_t oa_rank_reg() {
    static ggml_backend_reg reg = { GGML_BACKEND_API_VERSION,
                                    { reg_name, reg_count, reg_device, reg_address },
                                    nullptr };
    return &reg;
}

void oa_rank_devices_make(int rank, int n_ranks, ggml_backend_dev_t own, int n_threads, bool minimal) {
    GGML_ASSERT(g_devices.empty() && rank >= 0 && rank < n_ranks);
    g_rank    = rank;
    g_minimal = minimal;
    for (int i = 0; i < n_ranks; ++i) {
        g_devices.push_back(
            { "RANK" + std::to_string(i), own, i == rank, n_threads, { device_interface, oa_rank_reg(), nullptr } });
        g_devices.back().device.context = &g_devices.back();
    }
}

int oa_rank_own() {
    return g_rank;
}

int oa_rank_count() {
    return int(g_devices.size());
}
