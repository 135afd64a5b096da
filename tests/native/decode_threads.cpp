// Our products with few columns on random operators (kernel_threads.h): matrices and mixtures of experts.
#include "kernel_threads.h"
#include "own_products.h"
#include "skipped_experts.h"
#include "thin_products.h"

namespace {

Operator make(Random & random) {
    const ggml_type types[] = { GGML_TYPE_Q4_0, GGML_TYPE_Q8_0, GGML_TYPE_MXFP4, GGML_TYPE_Q4_K, GGML_TYPE_Q6_K };
    const ggml_type type    = any_of(random, types);
    const bool      mixture = random() % 2;
    const int64_t   block = ggml_blck_size(type), longest = 256 * 5 / block;
    const int64_t   n_k = block * int64_t(1 + random() % uint64_t(longest)), n_rows = int64_t(1 + random() % 300);
    const int64_t   n_experts = mixture ? int64_t(1 + random() % 6) : 1, n_used = int64_t(1 + random() % n_experts);
    const int64_t   most      = OA_FEW_COLUMNS * n_experts - 1; // columns, or choices
    const int64_t   n_tokens  = mixture ? int64_t(1 + random() % uint64_t(most / n_used)) : 1;
    const int64_t   n_columns = mixture ? (random() % 2 ? 1 : n_used) : int64_t(1 + random() % uint64_t(most));
    Operator        made;
    ggml_tensor *   weight  = made.tensor(type, n_k, n_rows, n_experts, 1);
    ggml_tensor *   columns = made.tensor(GGML_TYPE_F32, n_k, n_columns, n_tokens, 1);
    fill(weight, random);
    fill(columns, random);
    if (mixture) {
        ggml_tensor * chosen  = made.tensor(GGML_TYPE_I32, n_used, n_tokens, 1, 1);
        const int     skipped = any_skipped(random);
        for (int64_t i = 0; i < n_used * n_tokens; ++i) {
            const auto expert                       = int32_t(random() % uint64_t(n_experts));
            static_cast<int32_t *>(chosen->data)[i] = int(random() % 4) < skipped ? -1 : expert;
        }
        made.node                                   = ggml_mul_mat_id(made.ctx.get(), weight, columns, chosen);
        made.node->op_params[OA_LAST_NOTHING_PARAM] = random() % 4 == 0;
    } else {
        made.node = ggml_mul_mat(made.ctx.get(), weight, columns);
    }
    made.mark(OA_PRODUCTS_PARAM);
    return made;
}

std::string kind(const ggml_tensor * node) {
    return node->op == GGML_OP_MUL_MAT ? "matrix" : "mixture";
}

} // namespace

int main(int argc, char ** argv) {
    return run_family({ make, oa_thin_takes, oa_products_use, kind, { "avx2", "avx-vnni", "avx512" } }, argc, argv);
}
