// Sizes and offsets of RPC messages, before they are used. The rules for operators are in rpc_rules_*.cpp.
#include "rpc_operators.h"
#include "rpc_worker.h"

#include "ggml-backend-impl.h"
#include "ggml-impl.h"
#include "rpc_hooks.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <string>
#include <unistd.h>

namespace {

constexpr int64_t  MOST_ELEMENTS = int64_t(1) << 62;
constexpr uint64_t MOST_NODES    = 1 << 18;
constexpr uint64_t MOST_TENSORS  = 1 << 19;
constexpr uint64_t HEADER        = 4096; // of a message with data, and more

#pragma pack(push, 1)
// ggml-rpc.cpp's rpc_tensor; sizes are compared at each call.
struct wire_tensor {
    uint64_t id;
    uint32_t type;
    uint64_t buffer;
    uint32_t ne[GGML_MAX_DIMS];
    uint32_t nb[GGML_MAX_DIMS];
    uint32_t op;
    int32_t  op_params[GGML_MAX_OP_PARAMS / sizeof(int32_t)];
    int32_t  flags;
    uint64_t src[GGML_MAX_SRC];
    uint64_t view_src;
    uint64_t view_offs;
    uint64_t data;
    char     name[GGML_MAX_NAME];
    int32_t  use_count;
};
#pragma pack(pop)

__extension__ typedef unsigned __int128 wide;

uint64_t g_allocated = 0; // bytes in this client's buffers

bool refuse(const char * why) {
    GGML_LOG_ERROR("RPC message refused: %s\n", why);
    return false;
}

bool refuse(const ggml_tensor * node, const char * why) {
    GGML_LOG_ERROR("RPC message refused: %s, operator %s: %s\n", node->name, ggml_op_name(node->op), why);
    return false;
}

// Bytes from the first to behind the last, whichever way the rows are walked: by strides, rows in one piece, packed.
// I is 128 bits wide for numbers from the network, and 64 for those that oa_rpc_check_tensor has accepted.
template <typename I> struct extents {
    I strided = 0, rows = 0, packed = 0;
    I most() const { return std::max({ strided, rows, packed }); }
};

template <typename I, typename N, typename B> extents<I> extents_of(ggml_type type, const N * ne, const B * nb) {
    const I size = ggml_type_size(type), block = ggml_blck_size(type);
    I       rest = 0, elements = 1;
    for (int i = 0; i < GGML_MAX_DIMS; ++i) {
        if (ne[i] <= 0) {
            return {};
        }
        elements *= I(ne[i]);
        rest += i > 0 ? (I(ne[i]) - 1) * I(nb[i]) : 0;
    }
    if (block == 1) {
        return { size + (I(ne[0]) - 1) * I(nb[0]) + rest, I(ne[0]) * size + rest, elements * size };
    }
    return { I(ne[0]) * I(nb[0]) / block + rest, I(ne[0]) / block * size + rest, elements / block * size };
}

// The largest power of two, up to 8, that the elements' size is a multiple of: what their fields are aligned to.
uint64_t alignment_of(ggml_type type) {
    const uint64_t size = ggml_type_size(type);
    return std::min<uint64_t>(size & -size, 8);
}

bool fits(const ggml_tensor * t, uint64_t bytes) {
    const auto base = uint64_t(uintptr_t(ggml_backend_buffer_get_base(t->buffer)));
    const auto size = ggml_backend_buffer_get_size(t->buffer);
    const auto at   = uint64_t(uintptr_t(t->data));
    return at >= base && at - base <= size && bytes <= size - (at - base);
}

bool computes(const ggml_tensor * node) {
    switch (node->op) {
        case GGML_OP_NONE:
        case GGML_OP_RESHAPE:
        case GGML_OP_VIEW:
        case GGML_OP_PERMUTE:
        case GGML_OP_TRANSPOSE: return false;
        default: return true;
    }
}

// The bytes an operator may touch lie in one buffer that its device can reach.
bool reachable(ggml_backend_t backend, const ggml_tensor * t) {
    if (ggml_is_empty(t)) {
        return true;
    }
    if (!t->buffer || !t->data || !fits(t, extents_of<uint64_t>(t->type, t->ne, t->nb).most())) {
        return false;
    }
    // Some backends find the data by the tensor that a view is of.
    if (t->view_src && !ggml_is_empty(t->view_src)) {
        const ggml_tensor * of = t->view_src;
        if (of->buffer != t->buffer || uintptr_t(of->data) + t->view_offs != uintptr_t(t->data)) {
            return false;
        }
    }
    return ggml_backend_supports_buft(backend, ggml_backend_buffer_get_type(t->buffer));
}

} // namespace

bool oa_rpc_check_message(uint64_t size) {
    const uint64_t graph = MOST_NODES * sizeof(uint64_t) + MOST_TENSORS * sizeof(wire_tensor) + HEADER;
    return size <= std::max(graph, g_allocated + HEADER) || refuse("it is longer than any this client may send");
}

bool oa_rpc_check_alloc(ggml_backend_t backend, uint64_t size) {
    size_t free = 0, total = 0;
    ggml_backend_dev_memory(ggml_backend_get_device(backend), &free, &total);
    const size_t most = ggml_backend_buft_get_max_size(ggml_backend_get_default_buffer_type(backend));
    if (size > most || (total > 0 && (size > total || g_allocated > total - size))) {
        return refuse("a buffer larger than the device");
    }
    return true;
}

void oa_rpc_buffer_made(ggml_backend_buffer_t buffer) {
    g_allocated += ggml_backend_buffer_get_size(buffer);
    oa_rpc::worker_is_used();
}

void oa_rpc_buffer_freed(ggml_backend_buffer_t buffer) {
    g_allocated -= ggml_backend_buffer_get_size(buffer);
}

bool oa_rpc_check_tensor(const void * rpc_tensor, size_t size, const oa_rpc_buffers & buffers) {
    wire_tensor t;
    if (size != sizeof(t)) {
        return refuse("tensors are of another version");
    }
    std::memcpy(&t, rpc_tensor, sizeof(t));
    const auto type = ggml_type(t.type);
    if (t.type >= GGML_TYPE_COUNT || ggml_blck_size(type) == 0 || ggml_type_size(type) == 0) {
        return refuse("unknown type of tensor");
    }
    if (t.op >= GGML_OP_COUNT) {
        return refuse("unknown operator");
    }
    int64_t elements = t.ne[0];
    for (int i = 1; i < GGML_MAX_DIMS; ++i) {
        if (t.ne[i] > 1 && __builtin_mul_overflow(elements, int64_t(t.ne[i]), &elements)) {
            return refuse("a tensor with too many elements");
        }
        if (elements > MOST_ELEMENTS) {
            return refuse("a tensor with too many elements");
        }
    }
    if (t.ne[0] % ggml_blck_size(type) != 0) {
        return refuse("rows that are no whole blocks");
    }
    const auto bytes = extents_of<wide>(type, t.ne, t.nb);
    if (bytes.most() > uint64_t(MOST_ELEMENTS)) {
        return refuse("a tensor with too many bytes");
    }
    auto * buffer = reinterpret_cast<ggml_backend_buffer_t>(t.buffer);
    if (!buffer || buffers.count(buffer) == 0) {
        return true; // it is used without one, or refused where it needs one
    }
    const auto     base = uint64_t(uintptr_t(ggml_backend_buffer_get_base(buffer)));
    const uint64_t room = ggml_backend_buffer_get_size(buffer);
    if (t.data < base || t.data - base > room || bytes.strided > room - (t.data - base)) {
        return refuse("a tensor outside of its buffer");
    }
    uint64_t bits = t.data;
    for (int i = 0; i < GGML_MAX_DIMS; ++i) {
        bits |= t.ne[i] > 1 ? t.nb[i] : 0;
    }
    return (bits & (alignment_of(type) - 1)) == 0 || refuse("a tensor that is not aligned");
}

bool oa_rpc_check_range(const ggml_tensor * tensor, uint64_t offset, uint64_t size) {
    const uint64_t bytes = ggml_nbytes(tensor);
    return (offset <= bytes && size <= bytes - offset) || refuse("data outside of its tensor");
}

bool oa_rpc_check_copy(const ggml_tensor * src, const ggml_tensor * dst) {
    const uint64_t bytes = ggml_nbytes(src);
    const auto     from = uint64_t(uintptr_t(src->data)), to = uint64_t(uintptr_t(dst->data));
    if (bytes != ggml_nbytes(dst)) {
        return refuse("a copy between tensors of different sizes");
    }
    return from + bytes <= to || to + bytes <= from || refuse("a copy onto itself");
}

bool oa_rpc_check_alloc_size(const ggml_tensor * tensor) {
    if (ggml_is_quantized(tensor->type) && tensor->nb[0] != ggml_type_size(tensor->type)) {
        return refuse("blocks that are not side by side");
    }
    return !computes(tensor) || oa_rpc::has_sources(tensor) || refuse(tensor, "a source is missing");
}

bool oa_rpc_check_init(const ggml_tensor * tensor) {
    ggml_tensor plain = *tensor;
    plain.op          = GGML_OP_NONE;
    if (!plain.buffer || !oa_rpc_check_alloc_size(&plain)) {
        return false;
    }
    const size_t bytes = ggml_backend_buft_get_alloc_size(ggml_backend_buffer_get_type(plain.buffer), &plain);
    return fits(&plain, bytes) || refuse("no room behind a tensor");
}

bool oa_rpc_check_graph(uint64_t n_nodes, uint64_t n_tensors, size_t message_size) {
    const uint64_t need = 3 * sizeof(uint32_t) + n_nodes * sizeof(uint64_t) + n_tensors * sizeof(wire_tensor);
    return (n_nodes > 0 && n_nodes <= MOST_NODES && n_tensors <= MOST_TENSORS && need <= message_size) ||
           refuse("sizes of a graph");
}

bool oa_rpc_check_sources(const void * rpc_tensor, const std::unordered_map<uint64_t, ggml_tensor *> & made) {
    wire_tensor t;
    std::memcpy(&t, rpc_tensor, sizeof(t));
    for (int i = 0; i < GGML_MAX_SRC; ++i) {
        const uint64_t id = t.src[i];                       // by value: fields of a packed structure are not aligned
        if (id != 0 && id != t.id && made.count(id) == 0) { // ggml_cast's result is its own second source
            return refuse("a source that comes after its tensor");
        }
    }
    const uint64_t of = t.view_src;
    return of == 0 || made.count(of) > 0 || refuse("a view that comes before its tensor");
}

bool oa_rpc_check_node(ggml_backend_t backend, const ggml_cgraph * graph, const ggml_tensor * node) {
    if (!node) {
        return refuse("a graph with an empty node");
    }
    const size_t at = ggml_hash_find(&graph->visited_hash_set, node);
    if (at == GGML_HASHSET_FULL || ggml_bitset_get(graph->visited_hash_set.used, at)) {
        return refuse(node, "it is twice in the graph");
    }
    if (!computes(node)) {
        return true;
    }
    if (!oa_rpc::has_sources(node)) {
        return refuse(node, "not one for graphs that come by network, or a source is missing");
    }
    if (!oa_rpc::fits_sources(node)) {
        return refuse(node, "its shape or type does not follow from its sources");
    }
    if (!reachable(backend, node)) {
        return refuse(node, "it has no place in a buffer of its device");
    }
    for (const ggml_tensor * source : node->src) {
        if (source && !reachable(backend, source)) {
            return refuse(node, "a source has no place in a buffer of its device");
        }
    }
    return ggml_backend_supports_op(backend, node) || refuse(node, "the device cannot compute it");
}

void oa_rpc_cache_write(const char * path, const void * data, size_t size) {
    const std::string part = std::string(path) + "." + std::to_string(getpid()) + ".part";
    const int         fd   = open(part.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    size_t            done = 0;
    while (fd >= 0 && done < size) {
        const ssize_t n = write(fd, static_cast<const char *>(data) + done, size - done);
        if (n <= 0) {
            break;
        }
        done += size_t(n);
    }
    const bool closed = fd >= 0 && close(fd) == 0;
    if (!closed || done < size || rename(part.c_str(), path) != 0) {
        GGML_LOG_ERROR("cannot write %s to the cache\n", path);
        unlink(part.c_str());
    }
}

bool oa_rpc_cache_fits(const ggml_tensor * tensor, uint64_t offset, size_t size) {
    const uint64_t bytes = ggml_nbytes(tensor);
    return offset == 0 ? size == bytes : offset <= bytes && size <= bytes - offset;
}
