#include "own_attention.h"

#include "alone.h"
#include "ggml-cpu-impl.h"
#include "ggml-cpu.h"
#include "kernel_choice.h"
#include "operators.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace oa::attend {

namespace {

constexpr int64_t some_items  = 64;  // what a task is cut into at least, where it is long enough: threads take turns
constexpr int64_t least_split = 128; // tokens; a part costs a row of partial values
constexpr int64_t widest      = 16;  // values of a vector
constexpr int64_t long_turns  = 8;   // of a thread, about

#if defined(__x86_64__)
// Whether the CPU has AMX for bf16, and the kernel lets this process use it.
bool has_amx() {
    unsigned a, b, c, d, more;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(d >> 22 & 1) || !(d >> 24 & 1) ||
        !__get_cpuid_count(7, 1, &more, &b, &c, &d) || !(more >> 5 & 1)) {
        return false;
    }
    constexpr int request_permission = 0x1023, tile_data = 18; // ARCH_REQ_XCOMP_PERM of asm/prctl.h
    return syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
}
#endif

bool has(const Kernels & kernels) {
#if defined(__x86_64__)
    if (&kernels == &amx_kernels) {
        static const bool amx = has_amx();
        return amx && cpu_has_avx512();
    }
    if (&kernels == &avx512_kernels) {
        return cpu_has_avx512();
    }
    return &kernels == &base_kernels || cpu_has_avx2();
#else
    return &kernels == &base_kernels;
#endif
}

bool is_default(const Kernels & kernels) {
    const char * amx = getenv("OALLAMA_AMX"); // 0 leaves AMX alone
    return kernels.many != Method::tiles || !amx || strcmp(amx, "0") != 0;
}

KernelChoice<Kernels> & choice() {
    static KernelChoice<Kernels> made(
        {
#if defined(__x86_64__)
            &amx_kernels, &avx512_kernels, &avx2_kernels,
#endif
                &base_kernels
        },
        has, is_default);
    return made;
}

bool type_of(ggml_type type, CacheType & found) {
    switch (type) {
        case GGML_TYPE_F32: found = CacheType::f32; return true;
        case GGML_TYPE_F16: found = CacheType::f16; return true;
        case GGML_TYPE_BF16: found = CacheType::bf16; return true;
        case GGML_TYPE_Q8_0: found = CacheType::q8_0; return true;
        case GGML_TYPE_Q4_0: found = CacheType::q4_0; return true;
        default: return false;
    }
}

// Rows from which on words are faster than dots; with a cache of 4 bits they always are. Chosen by trial.
constexpr int64_t few_for_words = 3;

bool is_bytes(CacheType type) {
    return type == CacheType::q8_0 || type == CacheType::q4_0;
}

// Tiles have 16 bits of a value: enough for what is rounded more in the cache.
Method method_of_many(const Task & task) {
    const bool whole = task.k_type == CacheType::f32 || task.v_type == CacheType::f32;
    return whole ? Method::columns : kernels().many;
}

// Rows of a tile: tile_rows or less, so that the number of all tiles is a multiple of some_items where that leaves half
// of these rows. Threads end together then.
int64_t rows_of_a_tile(const Task & task) {
    const int64_t rows = task.rows(), most = kernels().tile_rows, heads = task.n_sequences * task.n_head_kv;
    if (task.method == Method::tiles) {
        return most;
    }
    const int64_t fewest = parts(rows, most);
    const int64_t even   = parts(parts(fewest * heads, some_items) * some_items, heads);
    return parts(parts(rows, 2 * rows >= even * most ? even : fewest), widest) * widest;
}

// Cuts a task by its shape.
void cut(Task & task) {
    const int64_t rows   = task.rows();
    const bool    few    = rows < kernels().many_rows;
    task.method          = few ? method_of_few(task, rows) : method_of_many(task);
    task.heads_per_group = few ? task.n_head_kv : 1;
    task.rows_per_tile   = few ? rows : std::min(rows, rows_of_a_tile(task));
    task.n_tiles         = parts(rows, task.rows_per_tile);
    const int64_t whole  = task.n_sequences * task.n_tiles * (few ? 1 : task.n_head_kv);
    const int64_t wanted = std::min(parts(some_items, whole), parts(task.n_kv, least_split));
    task.split_tokens    = parts(parts(task.n_kv, wanted), block_tokens) * block_tokens;
    task.n_splits        = parts(task.n_kv, task.split_tokens);
    if (few) {
        // All K/V heads of a block lie beside each other in memory and are read together, unless that leaves too few
        // items.
        const int64_t groups = std::clamp<int64_t>(few_items / (whole * task.n_splits), 1, task.n_head_kv);
        task.heads_per_group = parts(task.n_head_kv, groups);
    }
    task.n_groups = parts(task.n_head_kv, task.heads_per_group);
}

Strides strides(const ggml_tensor * tensor) {
    return { tensor->nb[1], tensor->nb[2], tensor->nb[3] };
}

const char * data(const ggml_tensor * tensor) {
    return static_cast<const char *>(tensor->data);
}

} // namespace

const Kernels & kernels() {
    return choice().get();
}

Method method_of_few(const Task & task, int64_t rows) {
    const bool k = is_bytes(task.k_type), v = is_bytes(task.v_type);
    const bool whole_blocks = (!k || task.d_k % block_values == 0) && (!v || task.d_v % block_values == 0);
    const bool has_4_bits   = task.k_type == CacheType::q4_0 || task.v_type == CacheType::q4_0;
    const bool words        = kernels().words && whole_blocks && (k || v) && (rows >= few_for_words || has_4_bits);
    return words ? Method::words : Method::dots;
}

const char * read(const ggml_tensor * node, Task & task) {
    const ggml_tensor * q = node->src[0], *k = node->src[1], *v = node->src[2], *mask = node->src[3];
    const ggml_tensor * sinks = node->src[4];
    task                      = {};
    if (ggml_is_empty(node) || ggml_is_empty(k) || ggml_is_empty(v)) {
        return "nothing to attend to";
    }
    if (q->type != GGML_TYPE_F32 || q->nb[0] != sizeof(float)) {
        return "queries are not f32";
    }
    if (!type_of(k->type, task.k_type) || !type_of(v->type, task.v_type)) {
        return "no kernel for this type of cache";
    }
    if (k->nb[0] != ggml_type_size(k->type) || v->nb[0] != ggml_type_size(v->type)) {
        return "rows of the cache are not contiguous";
    }
    if (k->ne[0] % widest != 0 || v->ne[0] % widest != 0) {
        return "heads are no multiple of 16 values wide";
    }
    if (k->ne[2] != v->ne[2] || k->ne[3] != v->ne[3] || q->ne[2] % k->ne[2] != 0 || q->ne[3] % k->ne[3] != 0) {
        return "K and V have different heads";
    }
    if (mask && (mask->type != GGML_TYPE_F16 || mask->nb[0] != 2 || mask->ne[2] != 1)) {
        return "the mask is not one of f16 for all heads";
    }
    task.q                 = data(q);
    task.k                 = data(k);
    task.v                 = data(v);
    task.mask              = mask ? data(mask) : nullptr;
    task.sinks             = sinks ? static_cast<const float *>(sinks->data) : nullptr;
    task.out               = static_cast<char *>(node->data);
    task.q_strides         = strides(q);
    task.k_strides         = strides(k);
    task.v_strides         = strides(v);
    task.mask_strides      = mask ? strides(mask) : Strides{};
    task.mask_strides.head = 0;
    task.out_strides       = { node->nb[2], node->nb[1], node->nb[3] };
    task.d_k               = k->ne[0];
    task.d_v               = v->ne[0];
    task.n_tokens          = q->ne[1];
    task.n_head            = q->ne[2];
    task.n_head_kv         = k->ne[2];
    task.n_sequences       = q->ne[3];
    task.n_kv              = k->ne[1];
    task.mask_sequences    = mask ? mask->ne[3] : 1;
    task.kv_sequences      = k->ne[3];
    memcpy(&task.scale, node->op_params, sizeof(float));
    memcpy(&task.max_bias, node->op_params + 1, sizeof(float));
    memcpy(&task.softcap, node->op_params + 2, sizeof(float));
    task.k_bytes = ggml_row_size(k->type, task.d_k);
    task.v_bytes = ggml_row_size(v->type, task.d_v);
    if (node->op_params[OA_ATTEND_PARAM] == OA_ATTEND_ALONE) {
        return read_alone(task);
    }
    cut(task);
    return nullptr;
}

size_t scratch_bytes(const Task & task) {
    return parts(int64_t(kernels().scratch_floats(task) * sizeof(float)), int64_t(cache_line)) * cache_line;
}

namespace {

char * aligned(void * memory) {
    return reinterpret_cast<char *>((uintptr_t(memory) + cache_line - 1) & ~uintptr_t(cache_line - 1));
}

size_t partial_bytes(const Task & task) {
    const int64_t rows = task.n_sequences * task.n_tokens * task.n_head;
    return task.n_splits > 1 ? size_t(rows * task.n_splits * task.partial_floats()) * sizeof(float) : 0;
}

// How threads take items. By rows, an item fetches the beginning of the next one ahead, so a thread takes some at a
// time. It takes the last quarter one by one, so that no thread waits long for another.
class Turns {
  public:
    Turns(const Task & task, int n_threads) : n_items_(task.n_items()) {
        if (is_by_rows(task.method)) {
            at_once_ = std::max<int64_t>(n_items_ / (long_turns * n_threads), 1);
        }
        n_long_ = n_items_ * 3 / 4 / at_once_;
    }

    // The first item of a turn, or the number of items after the last turn.
    int64_t begin(int64_t turn) const {
        return std::min(std::min(turn, n_long_) * at_once_ + std::max<int64_t>(turn - n_long_, 0), n_items_);
    }

  private:
    int64_t n_items_, n_long_, at_once_ = 1;
};

} // namespace

void merge(const Task & task, int64_t number, const float * partials) {
    const float * parts_of_row = partials + number * task.n_splits * task.partial_floats();
    const int64_t query = number % task.n_head, token = number / task.n_head % task.n_tokens;
    const int64_t sequence = number / task.n_head / task.n_tokens;
    float *       to =
        reinterpret_cast<float *>(task.out + size_t(query) * task.out_strides.head +
                                  size_t(token) * task.out_strides.row + size_t(sequence) * task.out_strides.sequence);
    float most = task.sinks ? task.sinks[query] : -INFINITY;
    for (int64_t i = 0; i < task.n_splits; ++i) {
        most = std::max(most, parts_of_row[i * task.partial_floats()]);
    }
    memset(to, 0, size_t(task.d_v) * sizeof(float));
    float sum = task.sinks && most != -INFINITY ? std::exp(task.sinks[query] - most) : 0.0f;
    for (int64_t i = 0; i < task.n_splits; ++i) {
        const float * part = parts_of_row + i * task.partial_floats();
        if (part[1] == 0.0f) { // it saw nothing
            continue;
        }
        const float share = std::exp(part[0] - most);
        sum += part[1] * share;
        for (int64_t j = 0; j < task.d_v; ++j) {
            to[j] += part[2 + j] * share;
        }
    }
    for (int64_t j = 0; j < task.d_v && sum != 0.0f; ++j) {
        to[j] /= sum;
    }
}

} // namespace oa::attend

using namespace oa::attend;

const char * oa_attend_refusal(const ggml_tensor * node) {
    Task task;
    return read(node, task);
}

const char * oa_attend_kernel(const ggml_tensor * node) {
    static thread_local char name[32];
    Task                     task;
    if (read(node, task)) {
        return "";
    }
    constexpr const char * methods[] = { "dots", "words", "columns", "tiles" };
    snprintf(name, sizeof(name), "%s %s%s", kernels().name, methods[int(task.method)], task.alone ? " alone" : "");
    return name;
}

uint32_t oa_attend_alone(ggml_type type_k, ggml_type type_v, int64_t d_k, int64_t d_v) {
    CacheType  found;
    const bool fits = type_of(type_k, found) && type_of(type_v, found) && d_k % widest == 0 && d_v % widest == 0 &&
                      d_k % ggml_blck_size(type_k) == 0 && d_v % ggml_blck_size(type_v) == 0;
    return fits ? choice().number() : 0;
}

bool oa_attend_use(const char * instruction_set) {
    return choice().use(instruction_set);
}

bool oa_attend_takes(const ggml_tensor * node) {
    return node->op_params[OA_ATTEND_PARAM] && !oa_attend_refusal(node);
}

size_t oa_attend_work_bytes(const ggml_tensor * node, int n_threads) {
    Task task;
    read(node, task);
    const size_t bytes =
        task.alone ? alone_bytes(task, n_threads) : n_threads * scratch_bytes(task) + partial_bytes(task);
    return bytes + cache_line;
}

void oa_attend_compute(const ggml_compute_params * params, ggml_tensor * node, void (*worked)(int64_t)) {
    Task task;
    read(node, task);
    char * memory = aligned(params->wdata);
    if (task.alone) {
        compute_alone(params, task, memory, worked);
        return;
    }
    const size_t scratch  = scratch_bytes(task);
    float *      mine     = reinterpret_cast<float *>(memory + size_t(params->ith) * scratch);
    float *      partials = reinterpret_cast<float *>(memory + size_t(params->nth) * scratch);
    if (params->ith == 0) {
        ggml_threadpool_chunk_set(params->threadpool, params->nth);
    }
    ggml_barrier(params->threadpool);
    const Turns turns(task, params->nth);
    for (int64_t turn = params->ith; turns.begin(turn) < task.n_items();
         turn         = ggml_threadpool_chunk_add(params->threadpool, 1)) {
        for (int64_t item = turns.begin(turn); item < turns.begin(turn + 1); ++item) {
            kernels().run(task, item, mine, task.n_splits > 1 ? partials : nullptr, worked);
        }
    }
    if (task.n_splits > 1) {
        ggml_barrier(params->threadpool);
        const int64_t rows = task.n_sequences * task.n_tokens * task.n_head;
        for (int64_t row = params->ith; row < rows; row += params->nth) {
            merge(task, row, partials);
        }
    }
}
