#include "own_products.h"

#include "expert_choices.h"
#include "ggml-cpu-impl.h"
#include "ggml-cpu.h"
#include "kernel_choice.h"
#include "product_task.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include <algorithm>
#include <cstring>

namespace oa::products {

namespace {

constexpr int64_t some_items   = 128; // what a task is cut into at least, where it has them: threads take turns
constexpr int64_t fewest_tiles = 8;   // of columns in a part: unpacking a panel costs as much as about one
constexpr int64_t most_columns = 512; // in a part
constexpr size_t  cache_line   = 64;

bool has(const Kernels & kernels) {
#if defined(__x86_64__)
    if (&kernels == &avx512_kernels) {
        return cpu_has_avx512() && __builtin_cpu_supports("avx512vnni");
    }
    if (&kernels == &avx_vnni_kernels) {
        unsigned a, b, c, d; // not all compilers know the name
        return cpu_has_avx2() && __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 4 & 1);
    }
    return &kernels == &base_kernels || cpu_has_avx2();
#else
    return &kernels == &base_kernels;
#endif
}

KernelChoice<Kernels> & choice() {
    static KernelChoice<Kernels> made(
        {
#if defined(__x86_64__)
            &avx512_kernels, &avx_vnni_kernels, &avx2_kernels,
#endif
                &base_kernels
        },
        has, [](const Kernels &) { return true; });
    return made;
}

const Kernels & kernels() {
    return choice().get();
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

// An operator: one matrix with all columns, or the matrices of experts, each with the columns that chose it. How it is
// cut, by its shape alone: by panels of rows and parts of columns.
struct Work {
    Task                task;
    const ggml_tensor * mixture; // the operator, else null
    int64_t             n_experts;
    size_t              expert_stride;
    int64_t             n_panels, part_tiles;
    size_t              column_bytes, columns_bytes, scratch_bytes, begins_bytes, choices_bytes;

    int64_t tiles(int64_t n_columns) const { return parts(n_columns, kernels().tile_columns); }
};

void cut(Work & work) {
    const Kernels & k    = kernels();
    Task            one  = work.task;
    one.n_columns        = 1;
    const int64_t n      = work.task.n_columns;
    work.n_panels        = parts(work.task.n_rows, k.panel_rows);
    const int64_t wanted = parts(some_items, work.n_panels * work.n_experts);
    work.part_tiles      = std::min(std::max(parts(work.tiles(n), wanted), fewest_tiles), work.tiles(most_columns));
    work.column_bytes    = k.columns_bytes(one);
    work.columns_bytes   = lines(work.column_bytes * size_t(n));
    work.scratch_bytes   = lines(k.scratch_bytes(work.part_tiles * k.tile_columns));
    work.begins_bytes    = work.mixture ? lines(size_t(work.n_experts + 1) * sizeof(int32_t)) : 0;
    work.choices_bytes   = work.mixture ? lines(size_t(n) * sizeof(Choice)) : 0;
}

// Operators may come by network: nothing is taken for granted that a kernel relies on.
bool fits(const ggml_tensor * node) {
    const ggml_tensor * weight = node->src[0], *columns = node->src[1];
    const ggml_tensor * ids = node->op == GGML_OP_MUL_MAT_ID ? node->src[2] : nullptr;
    if (ggml_is_empty(weight) || ggml_is_empty(columns) || ggml_is_empty(node)) {
        return false;
    }
    const bool matrices = node->ne[0] == weight->ne[1] && columns->ne[0] == weight->ne[0] && weight->ne[3] == 1;
    const bool results  = ids ? ids->type == GGML_TYPE_I32 && ids->ne[0] == node->ne[1] && ids->ne[1] == node->ne[2] &&
                                   ggml_is_matrix(ids) && node->ne[3] == 1 && columns->ne[3] == 1 &&
                                   columns->ne[2] == node->ne[2] :
                                weight->ne[2] == 1 && ggml_nrows(node) == ggml_nrows(columns);
    return matrices && results && ggml_nrows(node) <= INT32_MAX;
}

// Null and the work where there is a kernel for the operator, else why not.
const char * read(const ggml_tensor * node, Work & work) {
    const ggml_tensor *weight = node->src[0], *columns = node->src[1];
    Task &             task = work.task;
    work                    = {};
    work.mixture            = node->op == GGML_OP_MUL_MAT_ID ? node : nullptr;
    if (!type_of(weight->type, task.type)) {
        return "no kernel for this type of weight";
    }
    if (!fits(node) || weight->nb[0] != ggml_type_size(weight->type)) {
        return "no product of matrices with contiguous rows";
    }
    if (columns->type != GGML_TYPE_F32 || columns->nb[0] != sizeof(float) || !ggml_is_contiguous(node)) {
        return "columns are not f32";
    }
    work.n_experts     = weight->ne[2];
    work.expert_stride = weight->nb[2];
    task.n_columns     = ggml_nrows(node);
    if (task.n_columns < OA_FEW_COLUMNS * work.n_experts) {
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
    task.out_stride    = size_t(node->ne[0]) * sizeof(float); // nb[1] may be anything where ne[1] is 1
    task.n_slots       = node->ne[1];
    cut(work);
    return nullptr;
}

// The matrices of an operator, one after another.
class Parts {
  public:
    Parts(const Work & work, const int32_t * begins, const Choice * choices, char * columns) :
        work_(work), begins_(begins), choices_(choices), columns_(columns) {}

    Task task(int64_t e) const {
        Task made      = work_.task;
        made.weight    = work_.task.weight + size_t(e) * work_.expert_stride;
        made.n_columns = begins_[e + 1] - begins_[e];
        made.choices   = choices_ ? choices_ + begins_[e] : nullptr;
        return made;
    }

    char * columns(int64_t e) const { return columns_ + size_t(begins_[e]) * work_.column_bytes; }

    int64_t items(int64_t e) const {
        return parts(work_.tiles(begins_[e + 1] - begins_[e]), work_.part_tiles) * work_.n_panels;
    }

    // Tiles of columns are quantised in pieces of their length, so that all threads have some.
    void quantise(int64_t ith, int64_t nth) const {
        const int64_t n_blocks = work_.task.n_k / block_values;
        const int64_t piece    = parts(n_blocks, parts(some_items, work_.tiles(work_.task.n_columns)));
        int64_t       number   = 0;
        for (int64_t e = 0; e < work_.n_experts; ++e) {
            const Task    of_expert = task(e);
            const int64_t n_tiles   = work_.tiles(of_expert.n_columns);
            for (int64_t tile = 0; tile < n_tiles; ++tile) {
                for (int64_t first = 0; first < n_blocks; first += piece) {
                    if (number++ % nth == ith) {
                        kernels().quantise(of_expert, tile, first, std::min(piece, n_blocks - first), columns(e));
                    }
                }
            }
        }
    }

    // Item i of expert e. Returns its multiply-adds.
    int64_t run(int64_t e, int64_t i, char * scratch) const {
        const Task    of_expert = task(e);
        const int64_t first     = i / work_.n_panels * work_.part_tiles;
        const int64_t n         = std::min(work_.part_tiles, work_.tiles(of_expert.n_columns) - first);
        kernels().run(of_expert, i % work_.n_panels, first, n, columns(e), scratch);
        return n * kernels().tile_columns * kernels().panel_rows * of_expert.n_k;
    }

  private:
    const Work &    work_;
    const int32_t * begins_;
    const Choice *  choices_;
    char *          columns_;
};

} // namespace

} // namespace oa::products

using namespace oa::products;

const char * oa_products_refusal(const ggml_tensor * node) {
    Work work;
    return read(node, work);
}

bool oa_products_has(ggml_type type) {
    WeightType found;
    return type_of(type, found);
}

const char * oa_products_kernel() {
    return kernels().name;
}

bool oa_products_use(const char * instruction_set) {
    return choice().use(instruction_set);
}

bool oa_products_takes(const ggml_tensor * node) {
    return node->op_params[OA_PRODUCTS_PARAM] && !oa_products_refusal(node);
}

size_t oa_products_work_bytes(const ggml_tensor * node, int n_threads) {
    Work work;
    read(node, work);
    return work.begins_bytes + work.choices_bytes + work.columns_bytes + size_t(n_threads) * work.scratch_bytes +
           cache_line;
}

void oa_products_compute(const ggml_compute_params * params, ggml_tensor * node, void (*worked)(int64_t)) {
    Work work;
    read(node, work);
    char *    memory   = reinterpret_cast<char *>(lines(uintptr_t(params->wdata)));
    int32_t   whole[2] = { 0, int32_t(work.task.n_columns) };
    int32_t * begins   = whole;
    Choice *  choices  = nullptr;
    if (work.mixture) {
        begins  = reinterpret_cast<int32_t *>(memory);
        choices = reinterpret_cast<Choice *>(memory + work.begins_bytes);
        memory += work.begins_bytes + work.choices_bytes;
        if (params->ith == 0) {
            group_choices(work.mixture, begins, choices);
        }
        ggml_barrier(params->threadpool);
    }
    const Parts all(work, begins, choices, memory);
    all.quantise(params->ith, params->nth);
    if (params->ith == 0) {
        ggml_threadpool_chunk_set(params->threadpool, params->nth);
    }
    ggml_barrier(params->threadpool);
    char * const scratch = memory + work.columns_bytes + size_t(params->ith) * work.scratch_bytes;
    int64_t      expert = 0, before = 0; // items of those before it
    for (int64_t item = params->ith;; item = ggml_threadpool_chunk_add(params->threadpool, 1)) {
        while (expert < work.n_experts && item >= before + all.items(expert)) {
            before += all.items(expert++);
        }
        if (expert == work.n_experts) {
            return;
        }
        worked(all.run(expert, item - before, scratch));
    }
}
