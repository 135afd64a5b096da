#include "thin_products.h"

#include "ggml-cpu-impl.h"
#include "ggml-cpu.h"
#include "own_products.h"
#include "skipped_experts.h"
#include "thin_task.h"
#include "thread_sanitizer.h"

#include <algorithm>
#include <string_view>

namespace oa::decode {

namespace {

constexpr int64_t most_columns = 7;   // more are for many columns (own_products.h)
constexpr int64_t most_tokens  = 2;   // of a mixture: each choice of an expert reads its matrix
constexpr int64_t some_items   = 8;   // of each thread, where there are rows enough: threads take turns
constexpr int64_t most_rows    = 128; // of an item
constexpr size_t  cache_line   = 64;

// Of the instruction set that our products with many columns take; null: it has none.
const Kernels * kernels() {
#if defined(__x86_64__)
    const std::string_view name = oa_products_kernel();
    for (const Kernels * each : { &avx512_kernels, &avx_vnni_kernels, &avx2_kernels }) {
        if (each->name == name) {
            return each;
        }
    }
#endif
    return nullptr;
}

const Kernel * kernel_of(ggml_type type) {
    const Kernels * const all = kernels();
    const auto            of  = [all](WeightType found) { return all ? &all->of[int(found)] : nullptr; };
    switch (type) {
        case GGML_TYPE_Q4_0: return of(WeightType::q4_0);
        case GGML_TYPE_Q8_0: return of(WeightType::q8_0);
        case GGML_TYPE_MXFP4: return of(WeightType::mxfp4);
        case GGML_TYPE_Q4_K: return of(WeightType::q4_k);
        case GGML_TYPE_Q6_K: return of(WeightType::q6_k);
        default: return nullptr;
    }
}

// An operator: a matrix with all columns, or each choice of an expert that is not skipped with the one column that it
// is for.
struct Work {
    const Kernel * kernel;
    int64_t        n_groups, n_columns;                    // of src[1]
    size_t         column_bytes, columns_bytes, out_bytes; // of a column, of all, of a column of results
    int64_t        n_rows, n_choices;                      // choices: all of a mixture, else 0
};

size_t lines(size_t nbytes) {
    return (nbytes + cache_line - 1) / cache_line * cache_line;
}

// Operators may come by network: nothing is taken for granted that a kernel relies on.
bool fits(const ggml_tensor * node) {
    const ggml_tensor *weight = node->src[0], *columns = node->src[1], *ids = node->src[2];
    if (node->ne[0] != weight->ne[1] || columns->ne[0] != weight->ne[0] || weight->ne[3] != 1) {
        return false;
    }
    if (node->op == GGML_OP_MUL_MAT) {
        return weight->ne[2] == 1 && ggml_nrows(node) == ggml_nrows(columns);
    }
    return ids->type == GGML_TYPE_I32 && ggml_is_matrix(ids) && ids->ne[0] == node->ne[1] &&
           ids->ne[1] == node->ne[2] && columns->ne[2] == node->ne[2] && node->ne[3] == 1 && columns->ne[3] == 1;
}

const char * read(const ggml_tensor * node, Work & work) {
    const ggml_tensor *weight = node->src[0], *columns = node->src[1];
    const bool         mixture = node->op == GGML_OP_MUL_MAT_ID;
    work                       = {};
    work.kernel                = kernel_of(weight->type);
    if (!work.kernel) {
        return "no kernel for this type of weight";
    }
    if (!fits(node) || weight->nb[0] != ggml_type_size(weight->type)) {
        return "no product of matrices with contiguous rows";
    }
    if (columns->type != GGML_TYPE_F32 || !ggml_is_contiguous(columns) || !ggml_is_contiguous(node)) {
        return "columns are not f32, one behind the other";
    }
    if (weight->ne[0] % work.kernel->group_values) {
        return "rows are not whole groups";
    }
    work.n_columns = ggml_nrows(columns);
    if (mixture ? node->ne[2] > most_tokens : work.n_columns > most_columns) {
        return "many columns";
    }
    work.n_groups      = weight->ne[0] / work.kernel->group_values;
    work.column_bytes  = size_t(work.n_groups * work.kernel->group_bytes);
    work.columns_bytes = lines(size_t(work.n_columns) * work.column_bytes);
    work.out_bytes     = size_t(node->ne[0]) * sizeof(float); // nb[1] may be anything where ne[1] is 1
    work.n_rows        = weight->ne[1];
    work.n_choices     = mixture ? ggml_nrows(node) : 0;
    return nullptr;
}

// Columns lie one behind the other, and so do their groups: threads take equal parts of all groups.
void quantise(const Work & work, const ggml_tensor * columns, char * to, int64_t ith, int64_t nth) {
    const int64_t all   = work.n_columns * work.n_groups;
    const int64_t first = all * ith / nth, end = all * (ith + 1) / nth;
    work.kernel->quantise(static_cast<const float *>(columns->data), first, end - first, to);
    const int64_t bytes = work.kernel->group_bytes;
    tell_written(to + first * bytes, size_t((end - first) * bytes));
}

// choices[0]: how many choices count; then they. They alone are cut into items, so that threads have equal parts.
void list_choices(const Work & work, const ggml_tensor * node, int64_t * choices) {
    choices[0] = 0;
    for (int64_t i = 0; i < work.n_choices; ++i) {
        if (!oa_skips(node, oa_choice(node, i % node->ne[1], i / node->ne[1]))) {
            choices[++choices[0]] = i;
        }
    }
}

struct Product {
    const char * weight;
    const char * columns;
    char *       out;
    int64_t      n_columns;
};

Product product(const Work & work, const ggml_tensor * node, const char * columns, int64_t choice) {
    const ggml_tensor * weight = node->src[0];
    Product             made   = { static_cast<const char *>(weight->data), columns, static_cast<char *>(node->data),
                                   work.n_columns };
    if (node->op == GGML_OP_MUL_MAT_ID) {
        const int64_t slot = choice % node->ne[1], token = choice / node->ne[1];
        const int32_t expert = oa_choice(node, slot, token);
        GGML_ASSERT(expert >= 0 && expert < weight->ne[2]); // ids may come by network
        const int64_t n_slots = node->src[1]->ne[1];
        made.weight += size_t(expert) * weight->nb[2];
        made.columns += size_t(token * n_slots + slot % n_slots) * work.column_bytes;
        made.out += size_t(choice) * work.out_bytes;
        made.n_columns = 1;
    }
    return made;
}

// Rows are summed alone: how many a thread takes at a time changes no bit.
int64_t rows_of_item(const Work & work, int64_t n_products, int64_t nth) {
    const int64_t rows = work.n_rows * n_products / (some_items * nth);
    return std::clamp((rows + 3) / 4 * 4, int64_t(4), most_rows);
}

void run(const Work & work, const ggml_tensor * node, const char * columns, int64_t choice, int64_t first,
         int64_t end) {
    const Product one = product(work, node, columns, choice);
    for (int64_t c = 0; c < one.n_columns; c += most_together) {
        const int          n           = int(std::min(one.n_columns - c, int64_t(most_together)));
        const char * const columns_now = one.columns + size_t(c) * work.column_bytes;
        char * const       out         = one.out + size_t(c) * work.out_bytes;
        work.kernel->multiply(one.weight, node->src[0]->nb[1], first, end, work.n_groups, columns_now, n, out,
                              work.out_bytes);
        tell_read(columns_now, size_t(n) * work.column_bytes);
        tell_written(out + size_t(first) * sizeof(float), size_t(end - first) * sizeof(float));
    }
}

} // namespace

} // namespace oa::decode

using namespace oa::decode;

const char * oa_thin_refusal(const ggml_tensor * node) {
    Work work;
    return read(node, work);
}

bool oa_thin_has(ggml_type type) {
    return kernel_of(type);
}

bool oa_thin_takes(const ggml_tensor * node) {
    return node->op_params[OA_PRODUCTS_PARAM] && !oa_thin_refusal(node);
}

size_t oa_thin_work_bytes(const ggml_tensor * node) {
    Work work;
    read(node, work);
    return work.columns_bytes + size_t(work.n_choices + 1) * sizeof(int64_t) + cache_line;
}

void oa_thin_compute(const ggml_compute_params * params, ggml_tensor * node, void (*worked)(int64_t)) {
    Work work;
    read(node, work);
    char * const    columns = reinterpret_cast<char *>(lines(uintptr_t(params->wdata)));
    int64_t * const choices = work.n_choices ? reinterpret_cast<int64_t *>(columns + work.columns_bytes) : nullptr;
    quantise(work, node->src[1], columns, params->ith, params->nth);
    if (params->ith == 0) {
        ggml_threadpool_chunk_set(params->threadpool, params->nth);
        if (choices) {
            list_choices(work, node, choices);
        }
    }
    ggml_barrier(params->threadpool);
    const int64_t n_products = choices ? choices[0] : 1, rows = rows_of_item(work, n_products, params->nth);
    const int64_t of_product = (work.n_rows + rows - 1) / rows, n_items = n_products * of_product;
    for (int64_t item = params->ith; item < n_items; item = ggml_threadpool_chunk_add(params->threadpool, 1)) {
        const int64_t first = item % of_product * rows, end = std::min(first + rows, work.n_rows);
        run(work, node, columns, choices ? choices[1 + item / of_product] : 0, first, end);
        worked((end - first) * node->src[0]->ne[0]);
    }
}
