// Commands to upstream's server loop with our checks, on a CPU backend: whatever comes, no memory error.
//
// An input is what a client sends after its hello, with names for addresses, which differ from run to run: a buffer is
// 1, 2, .. in the order of their making, and a tensor's data is then an offset. A GGML_ASSERT in a kernel ends the
// client's worker and nobody else (--isolate), so it ends the input here; any other abort is a finding.
#include "ggml-backend.h"
#include "ggml-cpu.h"
#include "ggml.h"

#include <arpa/inet.h>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <mutex>
#include <netdb.h>
#include <netinet/tcp.h>
#include <optional>
#include <sys/socket.h>
#include <unistd.h>

// The server's ends of the connection.
static ssize_t fuzz_recv(int fd, char * to, size_t size, int flags);
static ssize_t fuzz_send(int fd, const char * from, size_t size, int flags);

#define private public // the socket's constructor
#include "transport.h"
#undef private
#define recv fuzz_recv
#define send fuzz_send
#include "transport.cpp"
#undef recv
#undef send
#undef LOG_DBG
#define RPC_DEBUG RPC_DEBUG_2
#include "ggml-rpc.cpp"

extern "C" void __wrap_ggml_backend_dev_memory(ggml_backend_dev_t, size_t * free, size_t * total) {
    *free = *total = 1 << 26; // so much may be allocated
}

// A client may lay tensors over one another: then kernels copy onto what they copy from, inside of its buffer.
extern "C" void * __asan_memmove(void * to, const void * from, size_t size);
extern "C" void * __wrap___asan_memcpy(void * to, const void * from, size_t size) {
    return __asan_memmove(to, from, size);
}

extern "C" size_t LLVMFuzzerMutate(uint8_t * data, size_t size, size_t most);

namespace {

using bytes = std::vector<uint8_t>;

constexpr size_t HEAD = 1 + sizeof(uint64_t);

struct aborted {};

// A kernel refuses: the worker would end. Anything else must not abort.
void on_abort(const char * said) {
    const bool kernel = std::strstr(said, "/ggml-cpu/") || std::strstr(said, "/csrc/attend/") ||
                        std::strstr(said, "/csrc/products/") || std::strstr(said, "/csrc/decode/") ||
                        std::strstr(said, "Unsuccessful graph computations");
    if (!kernel) {
        fprintf(stderr, "abort outside of kernels: %s\n", said);
        __builtin_trap();
    }
    throw aborted();
}

struct message {
    uint8_t  command;
    uint64_t size;
    bytes    body;
};

std::vector<message> split(const uint8_t * data, size_t size) {
    std::vector<message> all;
    while (size >= HEAD) {
        message one;
        one.command = data[0];
        std::memcpy(&one.size, data + 1, sizeof(one.size));
        const size_t n = size_t(std::min<uint64_t>(one.size, size - HEAD));
        one.body.assign(data + HEAD, data + HEAD + n);
        data += HEAD + n;
        size -= HEAD + n;
        all.push_back(std::move(one));
    }
    return all;
}

bytes join(const std::vector<message> & all) {
    bytes data;
    for (const message & one : all) {
        const auto * size = reinterpret_cast<const uint8_t *>(&one.size);
        data.push_back(one.command);
        data.insert(data.end(), size, size + sizeof(one.size));
        data.insert(data.end(), one.body.begin(), one.body.end());
    }
    return data;
}

// Offsets of the tensors in a message.
std::vector<size_t> tensors_of(const message & one) {
    size_t first = 0, n = 0;
    switch (one.command) {
        case RPC_CMD_SET_TENSOR:
        case RPC_CMD_SET_TENSOR_HASH:
        case RPC_CMD_GET_TENSOR:
        case RPC_CMD_INIT_TENSOR:
        case RPC_CMD_MEMSET_TENSOR: n = 1; break;
        case RPC_CMD_COPY_TENSOR: n = 2; break;
        case RPC_CMD_GET_ALLOC_SIZE: first = 4, n = 1 + GGML_MAX_SRC; break;
        case RPC_CMD_GRAPH_COMPUTE: {
            uint32_t nodes = 0;
            if (one.body.size() >= 8) {
                std::memcpy(&nodes, one.body.data() + 4, sizeof(nodes));
            }
            first = 12 + size_t(nodes) * 8;
            n     = one.body.size() > first ? (one.body.size() - first) / sizeof(rpc_tensor) : 0;
        }
    }
    std::vector<size_t> at;
    for (size_t i = 0; i < n && first + (i + 1) * sizeof(rpc_tensor) <= one.body.size(); ++i) {
        at.push_back(first + i * sizeof(rpc_tensor));
    }
    return at;
}

struct client {
    std::vector<message> todo;
    size_t               next = 0;
    bytes                ready; // to be read by the server
    size_t               read = 0;
    bytes                sent; // by the server since the last command
    uint8_t              last = 0xff;

    std::vector<std::pair<uint64_t, uint64_t>> buffers; // address and first byte; freed ones stay

    uint64_t address(uint64_t name) const { return name - 1 < buffers.size() ? buffers[name - 1].first : name; }

    void learn() {
        if (last == RPC_CMD_ALLOC_BUFFER && sent.size() == 8 + sizeof(rpc_msg_alloc_buffer_rsp)) {
            rpc_msg_alloc_buffer_rsp made;
            std::memcpy(&made, sent.data() + 8, sizeof(made));
            if (made.remote_ptr) {
                auto * base = ggml_backend_buffer_get_base(reinterpret_cast<ggml_backend_buffer_t>(made.remote_ptr));
                buffers.push_back({ made.remote_ptr, uint64_t(uintptr_t(base)) });
            }
        }
        sent.clear();
    }

    void translate(message & one) const {
        if (one.command == RPC_CMD_BUFFER_GET_BASE || one.command == RPC_CMD_FREE_BUFFER ||
            one.command == RPC_CMD_BUFFER_CLEAR) {
            if (one.body.size() >= 8) {
                uint64_t name;
                std::memcpy(&name, one.body.data(), 8);
                name = address(name);
                std::memcpy(one.body.data(), &name, 8);
            }
        }
        for (const size_t at : tensors_of(one)) {
            rpc_tensor tensor;
            std::memcpy(&tensor, one.body.data() + at, sizeof(tensor));
            if (tensor.buffer - 1 < buffers.size()) {
                tensor.data += buffers[tensor.buffer - 1].second;
                tensor.buffer = address(tensor.buffer);
                std::memcpy(one.body.data() + at, &tensor, sizeof(tensor));
            }
        }
    }

    bool fill() {
        if (read < ready.size()) {
            return true;
        }
        learn();
        if (next == todo.size()) {
            return false;
        }
        message & one = todo[next++];
        last          = one.command;
        translate(one);
        ready = join({ one });
        read  = 0;
        return true;
    }
} * g_client;

ggml_backend_t g_backend;

} // namespace

static ssize_t fuzz_recv(int, char * to, size_t size, int) {
    if (!g_client->fill()) {
        return 0;
    }
    const size_t n = std::min(size, g_client->ready.size() - g_client->read);
    std::memcpy(to, g_client->ready.data() + g_client->read, n);
    g_client->read += n;
    return ssize_t(n);
}

static ssize_t fuzz_send(int, const char * from, size_t size, int) {
    g_client->sent.insert(g_client->sent.end(), from, from + std::min<size_t>(size, 64));
    volatile char sum = 0; // what is sent has been written before
    for (size_t i = 0; i < size; ++i) {
        sum = char(sum ^ from[i]);
    }
    return ssize_t(size);
}

extern "C" int LLVMFuzzerInitialize(int *, char ***) {
    ggml_log_set([](ggml_log_level, const char *, void *) {}, nullptr);
    ggml_set_abort_callback(on_abort);
    g_backend = ggml_backend_cpu_init();
    ggml_backend_cpu_set_n_threads(g_backend, 1);
    ggml_threadpool_params one = ggml_threadpool_params_default(1); // kept: an abort would leak one of each graph
    ggml_backend_cpu_set_threadpool(g_backend, ggml_threadpool_new(&one));
    return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t * data, size_t size) {
    client one;
    one.todo = split(data, size);
    one.todo.insert(one.todo.begin(), { RPC_CMD_HELLO, RPC_CONN_CAPS_SIZE, bytes(RPC_CONN_CAPS_SIZE) });
    g_client = &one;
    try {
        rpc_serve_client({ g_backend }, nullptr, socket_ptr(new socket_t(std::make_unique<socket_t::impl>(-1))));
    } catch (const aborted &) {
    }
    return 0;
}

// Most inputs of a mutator that knows nothing end at the first length.
extern "C" size_t LLVMFuzzerCustomMutator(uint8_t * data, size_t size, size_t most, unsigned seed) {
    std::vector<message> all  = split(data, size);
    uint32_t             bits = seed;
    const auto           roll = [&](size_t n) {
        bits = bits * 1664525u + 1013904223u;
        return n ? (bits >> 8) % n : 0;
    };
    if (all.empty() || roll(16) == 0) {
        return LLVMFuzzerMutate(data, size, most);
    }
    const size_t at  = roll(all.size());
    message &    one = all[at];
    const auto   in  = tensors_of(one);
    switch (roll(12)) {
        case 0: all.insert(all.begin() + roll(all.size() + 1), message(one)); break;
        case 1: all.erase(all.begin() + at); break;
        case 2: std::swap(one, all[roll(all.size())]); break;
        case 3:
        case 4: { // any bytes, in place
            const size_t n = one.body.size();
            if (n) {
                bytes copy = one.body;
                LLVMFuzzerMutate(copy.data(), n, n);
                one.body = copy;
            }
            break;
        }
        default: { // one field of one tensor, or four bytes
            static const uint64_t INTERESTING[] = { 0,          1,          2,     3,         4,        5,
                                                    8,          16,         31,    32,        33,       64,
                                                    255,        256,        4096,  65536,     1u << 31, 0xffffffff,
                                                    1ull << 32, 1ull << 62, ~0ull, ~0ull - 15 };
            const size_t          base          = in.empty() ? 0 : in[roll(in.size())];
            const size_t          room          = in.empty() ? one.body.size() : sizeof(rpc_tensor) - GGML_MAX_NAME;
            const size_t          off           = base + roll(room / 4) * 4;
            uint64_t              value         = INTERESTING[roll(sizeof(INTERESTING) / 8)];
            if (roll(3) == 0) {
                value = roll(130);
            }
            const size_t n = roll(4) == 0 ? 8 : 4;
            if (off + n <= one.body.size()) {
                uint64_t old = 0;
                std::memcpy(&old, one.body.data() + off, n);
                value = roll(4) == 0 ? old + roll(9) - 4 : value;
                std::memcpy(one.body.data() + off, &value, n);
            }
        }
    }
    const bytes made = join(all);
    if (made.empty() || made.size() > most) {
        return LLVMFuzzerMutate(data, size, most);
    }
    std::memcpy(data, made.data(), made.size());
    return made.size();
}
