#include "thin_products.h"

#include "expert_choices.h"
#include "ggml-cpu-impl.h"
#include "ggml-cpu.h"
#include "own_products.h"
#include "thin_task.h"
#include "thread_sanitizer.h"

#include <algorithm>
#include <string_view>

namespace oa::decode {

namespace {

constexpr int64_t some_items  = 8;   // of each thread, where there are rows enough: threads take turns
constexpr int64_t most_rows   = 128; // of an item
constexpr int64_t most_once   = 64;  // columns that are given to a kernel at once
constexpr size_t  cache_line  = 64;
constexpr size_t  first_bytes = 8192; // that a thread fetches before it begins

using products::Choice;

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

// An operator: one matrix with all columns, or the matrices of experts, each with the columns that chose it.
struct Work {
    const Kernel *      kernel;
    const ggml_tensor * mixture;                               // the operator, else null
    int64_t n_values, n_rows, n_experts, n_columns, n_choices; // columns of src[1]; choices: all, skipped too
    int64_t column_bytes, group_bytes;
    size_t  columns_bytes, begins_bytes, used_bytes, choices_bytes;
};

size_t lines(size_t nbytes) {
    return (nbytes + cache_line - 1) / cache_line * cache_line;
}

// Operators may come by network: nothing is taken for granted that a kernel relies on.
bool fits(const ggml_tensor * node) {
    const ggml_tensor *weight = node->src[0], *columns = node->src[1], *ids = node->src[2];
    if (ggml_is_empty(weight) || ggml_is_empty(columns) || ggml_is_empty(node) || node->ne[0] != weight->ne[1] ||
        columns->ne[0] != weight->ne[0] || weight->ne[3] != 1) {
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
    work.n_experts = weight->ne[2];
    work.n_choices = ggml_nrows(node);
    if (work.n_choices >= OA_FEW_COLUMNS * work.n_experts) {
        return "many columns";
    }
    work.mixture       = mixture ? node : nullptr;
    work.n_values      = weight->ne[0];
    work.n_rows        = weight->ne[1];
    work.n_columns     = ggml_nrows(columns);
    work.group_bytes   = kernels()->group_bytes;
    work.column_bytes  = groups_of(work.n_values) * work.group_bytes;
    work.columns_bytes = lines(size_t(work.n_columns * work.column_bytes));
    work.begins_bytes  = mixture ? lines(size_t(work.n_experts + 1) * sizeof(int32_t)) : 0;
    work.used_bytes    = mixture ? lines(size_t(work.n_experts + 1) * sizeof(int32_t)) : 0;
    work.choices_bytes = mixture ? lines(size_t(work.n_choices) * sizeof(Choice)) : 0;
    return nullptr;
}

// What threads share of an operator. Plain pointers into its working memory.
struct Shared {
    char *    columns; // quantised
    int32_t * begins;  // of a mixture: where the choices of each expert begin
    int32_t * used;    // used[0]: how many experts are chosen; then they
    Choice *  choices;

    Shared(const Work & work, void * memory) : columns(reinterpret_cast<char *>(lines(uintptr_t(memory)))) {
        char * const behind = columns + work.columns_bytes;
        begins              = reinterpret_cast<int32_t *>(behind);
        used                = reinterpret_cast<int32_t *>(behind + work.begins_bytes);
        choices             = reinterpret_cast<Choice *>(behind + work.begins_bytes + work.used_bytes);
    }
};

// Columns lie one behind the other, and so do their groups: threads take equal parts of all groups.
void quantise(const Work & work, const float * columns, char * to, int64_t ith, int64_t nth) {
    const int64_t of_column = groups_of(work.n_values), all = work.n_columns * of_column;
    const int64_t first = all * ith / nth, end = all * (ith + 1) / nth;
    for (int64_t i = first; i < end; ++i) {
        const int64_t from = i % of_column * group_values, n = std::min(group_values, work.n_values - from);
        work.kernel->quantise(columns + i / of_column * work.n_values + from, n, to + i * work.group_bytes);
    }
    tell_written(to + first * work.group_bytes, size_t((end - first) * work.group_bytes));
}

// Experts without a choice have no items, so that threads have equal parts.
void list_used(const Work & work, const Shared & shared) {
    products::group_choices(work.mixture, shared.begins, shared.choices);
    int32_t n_used = 0;
    for (int32_t e = 0; e < work.n_experts; ++e) {
        if (shared.begins[e + 1] > shared.begins[e]) {
            shared.used[++n_used] = e;
        }
    }
    shared.used[0] = n_used;
}

struct Rows {
    const char * weight; // the first of them
    int64_t      expert, first, end;
};

// Rows that threads take in turn. Rows are summed alone: how many a thread takes at a time changes no bit.
class Items {
  public:
    Items(const Work & work, const ggml_tensor * weight, const Shared & shared, int64_t nth) :
        weight_(weight), used_(work.mixture ? shared.used : nullptr), n_matrices_(used_ ? used_[0] : 1) {
        const int64_t rows = weight->ne[1] * n_matrices_ / (some_items * nth);
        rows_              = std::clamp((rows + 3) / 4 * 4, int64_t(4), most_rows);
        of_matrix_         = (weight->ne[1] + rows_ - 1) / rows_;
    }

    int64_t n() const { return n_matrices_ * of_matrix_; }

    Rows at(int64_t item) const {
        const int64_t expert = used_ ? used_[1 + item / of_matrix_] : 0, first = item % of_matrix_ * rows_;
        return { static_cast<const char *>(weight_->data) + size_t(expert) * weight_->nb[2] +
                     size_t(first) * weight_->nb[1],
                 expert, first, std::min(first + rows_, weight_->ne[1]) };
    }

  private:
    const ggml_tensor * weight_;
    const int32_t *     used_;
    int64_t             n_matrices_, rows_, of_matrix_;
};

// Rows of a matrix with all columns that are for it. `then`: rows that the thread is likely to take next, or null.
// Returns the number of columns.
int64_t run(const Work & work, const Shared & shared, const ggml_tensor * node, const Rows & rows, const char * then) {
    const int64_t n_slots = node->ne[1], of_token = node->src[1]->ne[1]; // of a mixture
    const int64_t begin = work.mixture ? shared.begins[rows.expert] : 0;
    const int64_t n     = work.mixture ? shared.begins[rows.expert + 1] - begin : work.n_columns;
    for (int64_t from = 0; from < n; from += most_once) {
        Column        columns[most_once];
        const int64_t once = std::min(n - from, most_once), n_rows = rows.end - rows.first;
        for (int64_t i = 0; i < once; ++i) {
            int64_t column = from + i, result = from + i;
            if (work.mixture) {
                const Choice & choice = shared.choices[begin + from + i];
                column                = choice.token * of_token + choice.slot % of_token;
                result                = choice.token * n_slots + choice.slot;
            }
            columns[i] = { shared.columns + column * work.column_bytes,
                           static_cast<float *>(node->data) + result * work.n_rows + rows.first };
            tell_read(columns[i].groups, size_t(work.column_bytes));
            tell_written(columns[i].out, size_t(n_rows) * sizeof(float));
        }
        const bool last = from + once == n;
        work.kernel->multiply(rows.weight, node->src[0]->nb[1], n_rows, work.n_values, columns, once,
                              last ? then : nullptr);
    }
    return n;
}

// Into the second cache, as kernels do.
void fetch(const char * from, size_t n_bytes) {
    for (size_t i = 0; i < n_bytes; i += cache_line) {
        __builtin_prefetch(from + i, 0, 2);
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
    return work.columns_bytes + work.begins_bytes + work.used_bytes + work.choices_bytes + cache_line;
}

void oa_thin_compute(const ggml_compute_params * params, ggml_tensor * node, void (*worked)(int64_t)) {
    Work work;
    read(node, work);
    const Shared        shared(work, params->wdata);
    const ggml_tensor * weight = node->src[0];
    if (!work.mixture) { // what the thread begins with comes while columns are quantised
        const Rows first = Items(work, weight, shared, params->nth).at(params->ith);
        fetch(first.weight, first_bytes);
    }
    quantise(work, static_cast<const float *>(node->src[1]->data), shared.columns, params->ith, params->nth);
    if (params->ith == 0) {
        ggml_threadpool_chunk_set(params->threadpool, params->nth);
        if (work.mixture) {
            list_used(work, shared);
        }
    }
    ggml_barrier(params->threadpool);
    const Items items(work, weight, shared, params->nth);
    for (int64_t item = params->ith; item < items.n(); item = ggml_threadpool_chunk_add(params->threadpool, 1)) {
        const int64_t next = item + params->nth; // likely: threads take items in turn
        const Rows    rows = items.at(item);
        const int64_t n    = run(work, shared, node, rows, next < items.n() ? items.at(next).weight : nullptr);
        worked((rows.end - rows.first) * work.n_values * n);
    }
}
