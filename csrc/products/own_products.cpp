#include "own_products.h"

#include "ggml-cpu-impl.h"
#include "ggml-cpu.h"
#include "product_task.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <iterator>

namespace oa::products {

namespace {

constexpr int64_t fewest_columns = 8;       // for fewer, ggml's kernels are faster
constexpr int64_t some_items     = 128;     // what a task is cut into at least, where it has them: threads take turns
constexpr int64_t fewest_tiles   = 8;       // of columns in a part: unpacking a panel costs as much as about one
constexpr int64_t most_bytes     = 8 << 20; // of quantised columns in a part, which all panels read
constexpr size_t  cache_line     = 64;

std::atomic<const Kernels *> chosen{ nullptr };

bool has(const Kernels & kernels) {
#if defined(__x86_64__)
    // All CPUs with AVX2 have the rest of x86-64-v3 (F16C, BMI, LZCNT, MOVBE), whose names not all compilers know.
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2");
    if (&kernels == &avx512_kernels) {
        return avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
               __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512vnni");
    }
    if (&kernels == &avx_vnni_kernels) {
        return avx2 && __builtin_cpu_supports("avxvnni");
    }
    return &kernels == &base_kernels || avx2;
#else
    return &kernels == &base_kernels;
#endif
}

const Kernels * const by_speed[] = {
#if defined(__x86_64__)
    &avx512_kernels,
    &avx_vnni_kernels,
    &avx2_kernels,
#endif
    &base_kernels,
};

const Kernels & kernels() {
    if (const Kernels * known = chosen.load(std::memory_order_relaxed)) {
        return *known;
    }
    const auto found = std::find_if(std::begin(by_speed), std::end(by_speed), [](auto * each) { return has(*each); });
    chosen.store(*found, std::memory_order_relaxed);
    return **found;
}

bool type_of(ggml_type type, WeightType & found) {
    switch (type) {
        case GGML_TYPE_Q4_0: found = WeightType::q4_0; return true;
        case GGML_TYPE_Q8_0: found = WeightType::q8_0; return true;
        case GGML_TYPE_MXFP4: found = WeightType::mxfp4; return true;
        case GGML_TYPE_Q4_K: found = WeightType::q4_k; return true;
        case GGML_TYPE_Q6_K: found = WeightType::q6_k; return true;
        default: return false;
    }
}

int64_t parts(int64_t whole, int64_t part) {
    return (whole + part - 1) / part;
}

size_t lines(size_t nbytes) {
    return (nbytes + cache_line - 1) / cache_line * cache_line;
}

// Null and a task where there is a kernel for the operator, else why not.
const char * read(const ggml_tensor * node, Task & task) {
    const ggml_tensor *weight = node->src[0], *columns = node->src[1];
    task = {};
    if (!type_of(weight->type, task.type)) {
        return "no kernel for this type of weight";
    }
    if (weight->ne[2] != 1 || weight->ne[3] != 1 || weight->nb[0] != ggml_type_size(weight->type)) {
        return "the weight is no matrix with contiguous rows";
    }
    if (columns->type != GGML_TYPE_F32 || columns->nb[0] != sizeof(float) || !ggml_is_contiguous(node)) {
        return "columns are not f32";
    }
    task.n_columns = ggml_nrows(columns);
    if (task.n_columns < fewest_columns) {
        return "few columns";
    }
    task.weight        = static_cast<const char *>(weight->data);
    task.row_stride    = weight->nb[1];
    task.n_rows        = weight->ne[1];
    task.n_k           = weight->ne[0];
    task.columns       = static_cast<const char *>(columns->data);
    task.inner_stride  = columns->nb[1];
    task.middle_stride = columns->nb[2];
    task.outer_stride  = columns->nb[3];
    task.n_inner       = columns->ne[1];
    task.n_middle      = columns->ne[2];
    task.out           = static_cast<char *>(node->data);
    task.out_stride    = node->nb[1];
    return nullptr;
}

// How a task is cut, by its shape alone: by panels of rows and parts of columns.
struct Cut {
    int64_t n_panels, n_tiles, part_tiles, n_parts;
    size_t  columns_bytes, scratch_bytes;
};

Cut cut(const Task & task) {
    const Kernels & k = kernels();
    Cut             made;
    made.n_panels        = parts(task.n_rows, k.panel_rows);
    made.n_tiles         = parts(task.n_columns, k.tile_columns);
    made.columns_bytes   = lines(k.columns_bytes(task));
    const int64_t wanted = std::max(parts(some_items, made.n_panels), parts(int64_t(made.columns_bytes), most_bytes));
    made.part_tiles      = std::min(std::max(parts(made.n_tiles, wanted), fewest_tiles), made.n_tiles);
    made.n_parts         = parts(made.n_tiles, made.part_tiles);
    made.scratch_bytes   = lines(k.scratch_bytes(made.part_tiles * k.tile_columns));
    return made;
}

// Tiles of columns are quantised in pieces of their length, so that all threads have some.
void quantise(const Task & task, const Cut & at, int64_t ith, int64_t nth, char * to) {
    const int64_t n_blocks = task.n_k / block_values;
    const int64_t pieces   = std::min(parts(some_items, at.n_tiles), n_blocks);
    const int64_t piece    = parts(n_blocks, pieces);
    for (int64_t i = ith; i < at.n_tiles * pieces; i += nth) {
        const int64_t first = i % pieces * piece;
        if (first < n_blocks) {
            kernels().quantise(task, i / pieces, first, std::min(piece, n_blocks - first), to);
        }
    }
}

} // namespace

} // namespace oa::products

using namespace oa::products;

const char * oa_products_refusal(const ggml_tensor * node) {
    Task task;
    return read(node, task);
}

bool oa_products_has(ggml_type type) {
    WeightType found;
    return type_of(type, found);
}

const char * oa_products_kernel() {
    return kernels().name;
}

bool oa_products_use(const char * instruction_set) {
    for (const Kernels * each : by_speed) {
        if (!strcmp(each->name, instruction_set)) {
            if (has(*each)) {
                chosen = each;
            }
            return has(*each);
        }
    }
    chosen = nullptr;
    return !*instruction_set;
}

bool oa_products_takes(const ggml_tensor * node) {
    return node->op_params[OA_PRODUCTS_PARAM] && !oa_products_refusal(node);
}

size_t oa_products_work_bytes(const ggml_tensor * node, int n_threads) {
    Task task;
    read(node, task);
    const Cut at = cut(task);
    return at.columns_bytes + size_t(n_threads) * at.scratch_bytes + cache_line;
}

void oa_products_compute(const ggml_compute_params * params, ggml_tensor * node, void (*worked)(int64_t)) {
    Task task;
    read(node, task);
    const Cut     at      = cut(task);
    char * const  columns = reinterpret_cast<char *>(lines(uintptr_t(params->wdata)));
    char * const  scratch = columns + at.columns_bytes + size_t(params->ith) * at.scratch_bytes;
    const int64_t n_items = at.n_panels * at.n_parts;
    quantise(task, at, params->ith, params->nth, columns);
    if (params->ith == 0) {
        ggml_threadpool_chunk_set(params->threadpool, params->nth);
    }
    ggml_barrier(params->threadpool);
    for (int64_t item = params->ith; item < n_items; item = ggml_threadpool_chunk_add(params->threadpool, 1)) {
        const int64_t first = item / at.n_panels * at.part_tiles, n = std::min(at.part_tiles, at.n_tiles - first);
        kernels().run(task, item % at.n_panels, first, n, columns, scratch);
        worked(n * kernels().tile_columns * kernels().panel_rows * task.n_k);
    }
}
