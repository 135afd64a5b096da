// A ggml backend by the name of CUDA whose devices compute on the CPU and call the hooks of ggml-cuda (patch 0012),
// with weave_cuda_fake.cpp for CUDA: what serving/test_serve_devices.py has llama-server load by GGML_BACKEND_PATH. Its
// devices have memory that programs may not touch, as real ones; nodes are launched one by one, none fused, none
// captured.
//
// OALLAMA_FAKE_DEVICES: how many, 2 unless given. OALLAMA_FAKE_MEMORY: bytes of each, all free; 16 GiB unless given.
// OALLAMA_FAKE_WITHOUT: ggml's name of an operator that they do not have. OALLAMA_FAKE_LOG: a file that takes a line
// for every layer whose guests' rows are sent, with their number.
#include "ggml-backend-impl.h"
#include "ggml-impl.h"
#include "guest_op.h"
#include "weave_hooks_cuda.h"

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

namespace {

constexpr size_t max_devices = 4;

size_t number(const char * name, size_t otherwise) {
    const char * given = getenv(name);
    return given ? strtoull(given, nullptr, 10) : otherwise;
}

size_t n_devices() {
    return number("OALLAMA_FAKE_DEVICES", 2);
}

struct FakeDevice {
    int                      number;
    std::string              name;
    ggml_backend_buffer_type buft;
};

FakeDevice & of(ggml_backend_dev_t dev) {
    return *static_cast<FakeDevice *>(dev->context);
}

// ---- memory: the CPU's, under another type

const char * buft_name(ggml_backend_buffer_type_t buft) {
    return of(buft->device).name.c_str();
}

ggml_backend_buffer_t allocate(ggml_backend_buffer_type_t buft, size_t size) {
    ggml_backend_buffer_t made = ggml_backend_buft_alloc_buffer(ggml_backend_cpu_buffer_type(), size);
    if (made) {
        made->buft = buft;
    }
    return made;
}

size_t alignment(ggml_backend_buffer_type_t) {
    return ggml_backend_buft_get_alignment(ggml_backend_cpu_buffer_type());
}

bool is_not_host(ggml_backend_buffer_type_t) {
    return false;
}

const ggml_backend_buffer_type_i buft_interface = { buft_name, allocate, alignment, nullptr, nullptr, is_not_host };

// ---- graphs

struct FakeBackend {
    ggml_backend_t cpu;
    cudaStream_t   stream;
};

const char * backend_name(ggml_backend_t backend) {
    return of(backend->device).name.c_str();
}

void free_backend(ggml_backend_t backend) {
    auto * made = static_cast<FakeBackend *>(backend->context);
    ggml_backend_free(made->cpu);
    cudaStreamDestroy(made->stream);
    delete made;
    delete backend;
}

bool is_view(const ggml_tensor * node) {
    return node->op == GGML_OP_NONE || node->op == GGML_OP_RESHAPE || node->op == GGML_OP_VIEW ||
           node->op == GGML_OP_PERMUTE || node->op == GGML_OP_TRANSPOSE;
}

std::atomic<uint32_t> n_graphs{ 0 };

void log_rows(const ggml_tensor * node) {
    const char * path = getenv("OALLAMA_FAKE_LOG");
    if (path && oa::weave::guest_op(node).kind == oa::weave::GuestOp::Kind::send) {
        if (FILE * file = fopen(path, "a")) {
            fprintf(file, "%lld\n", static_cast<long long>(node->src[0]->ne[2]));
            fclose(file);
        }
    }
}

ggml_status compute(ggml_backend_t backend, ggml_cgraph * graph) {
    const auto & made   = *static_cast<FakeBackend *>(backend->context);
    const int    device = of(backend->device).number;
    ++n_graphs;
    oa_weave_cuda_begin(device, made.stream);
    oa_weave_cuda_plan(made.stream, graph->nodes, graph->n_nodes);
    for (int i = 0; i < graph->n_nodes; ++i) {
        ggml_tensor * node = graph->nodes[i];
        if (is_view(node) || (node->flags & GGML_TENSOR_FLAG_COMPUTE) == 0) {
            continue;
        }
        if (node->op == GGML_OP_CUSTOM) {
            log_rows(node);
            GGML_ASSERT(oa_weave_cuda_forward(made.stream, node));
        } else {
            ggml_cgraph one = ggml_graph_view(graph, i, i + 1);
            GGML_ASSERT(ggml_backend_graph_compute(made.cpu, &one) == GGML_STATUS_SUCCESS);
        }
        oa_weave_cuda_poll(device, made.stream, &node, 1);
    }
    oa_weave_cuda_poll(device, made.stream, nullptr, 0);
    oa_weave_cuda_end(device);
    return GGML_STATUS_SUCCESS;
}

ggml_guid_t guid() {
    static ggml_guid made = { 'o', 'a', 'l', 'l', 'a', 'm', 'a', ' ', 'f', 'a', 'k', 'e', ' ', 'g', 'p', 'u' };
    return &made;
}

ggml_backend_t make_backend(ggml_backend_dev_t dev, const char *) {
    auto *       made = new FakeBackend{ ggml_backend_init_by_type(GGML_BACKEND_DEVICE_TYPE_CPU, nullptr), nullptr };
    auto * const set_n_threads = reinterpret_cast<ggml_backend_set_n_threads_t>(ggml_backend_reg_get_proc_address(
        ggml_backend_dev_backend_reg(ggml_backend_get_device(made->cpu)), "ggml_backend_set_n_threads"));
    set_n_threads(made->cpu, 1);
    cudaStreamCreateWithFlags(&made->stream, cudaStreamNonBlocking);
    ggml_backend_i interface = {};
    interface.get_name       = backend_name;
    interface.free           = free_backend;
    interface.graph_compute  = compute;
    return new ggml_backend{ guid(), interface, dev, made };
}

// ---- devices

const char * device_name(ggml_backend_dev_t dev) {
    return of(dev).name.c_str();
}

const char * description(ggml_backend_dev_t) {
    return "a fake of the tests";
}

void memory(ggml_backend_dev_t, size_t * free, size_t * total) {
    *free = *total = number("OALLAMA_FAKE_MEMORY", size_t(16) << 30);
}

enum ggml_backend_dev_type type(ggml_backend_dev_t) {
    return GGML_BACKEND_DEVICE_TYPE_GPU;
}

void props(ggml_backend_dev_t dev, ggml_backend_dev_props * found) {
    *found             = {};
    found->name        = device_name(dev);
    found->description = description(dev);
    found->type        = type(dev);
    memory(dev, &found->memory_free, &found->memory_total);
}

ggml_backend_buffer_type_t buffer_type(ggml_backend_dev_t dev) {
    return &of(dev).buft;
}

bool supports_op(ggml_backend_dev_t dev, const ggml_tensor * op) {
    static ggml_backend_dev_t cpu     = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    const char *              without = getenv("OALLAMA_FAKE_WITHOUT");
    if (without && strcmp(ggml_op_name(op->op), without) == 0) {
        return false;
    }
    return op->op == GGML_OP_CUSTOM ? oa_weave_cuda_supports(of(dev).number, op) :
                                      ggml_backend_dev_supports_op(cpu, op);
}

bool supports_buft(ggml_backend_dev_t dev, ggml_backend_buffer_type_t buft) {
    return buft == &of(dev).buft;
}

ggml_backend_device_i device_interface() {
    ggml_backend_device_i made = {};
    made.get_name              = device_name;
    made.get_description       = description;
    made.get_memory            = memory;
    made.get_type              = type;
    made.get_props             = props;
    made.init_backend          = make_backend;
    made.get_buffer_type       = buffer_type;
    made.supports_op           = supports_op;
    made.supports_buft         = supports_buft;
    return made;
}

// ---- registry

const char * reg_name(ggml_backend_reg_t) {
    return "CUDA";
}

size_t device_count(ggml_backend_reg_t) {
    return n_devices();
}

ggml_backend_dev_t device_at(ggml_backend_reg_t reg, size_t index) {
    static FakeDevice          fakes[max_devices];
    static ggml_backend_device devices[max_devices];
    GGML_ASSERT(index < max_devices);
    if (!devices[index].context) {
        fakes[index]   = { int(index), "CUDA" + std::to_string(index), { buft_interface, &devices[index], nullptr } };
        devices[index] = { device_interface(), reg, &fakes[index] };
    }
    return &devices[index];
}

void * proc_address(ggml_backend_reg_t, const char * name) {
    return strcmp(name, oa::weave::new_sender_name) == 0 ? reinterpret_cast<void *>(oa_weave_new_cuda_sender) : nullptr;
}

ggml_backend_reg_t make_reg() {
    static ggml_backend_reg made = { GGML_BACKEND_API_VERSION,
                                     { reg_name, device_count, device_at, proc_address },
                                     nullptr };
    return &made;
}

} // namespace

extern "C" {
// Since the process began.
uint32_t fake_graphs() {
    return n_graphs;
}

ggml_backend_reg_t ggml_backend_init() {
    return make_reg();
}
}
