// Our products on random operators (kernel_threads.h): matrices and mixtures of experts, strided columns too.
#include "kernel_threads.h"
#include "own_products.h"
#include "skipped_experts.h"

namespace {

struct Shape {
    ggml_type type;
    int64_t   n_k, n_rows, n_tokens, n_sequences;
    bool      strided;
};

Shape any_shape(Random & random) {
    const ggml_type types[] = { GGML_TYPE_Q4_0, GGML_TYPE_Q8_0, GGML_TYPE_MXFP4, GGML_TYPE_Q4_K, GGML_TYPE_Q6_K };
    // More values than a panel has unpacked at once, and rows and tokens that fill no panel and no tile.
    return { any_of(random, types),      int64_t(256 * (1 + random() % 5)),
             int64_t(1 + random() % 90), OA_FEW_COLUMNS + int64_t(random() % 60),
             int64_t(1 + random() % 2),  random() % 2 == 0 };
}

// Columns, perhaps every other row of a larger tensor.
ggml_tensor * columns(Operator & made, Random & random, int64_t n_k, int64_t n, int64_t m, bool strided) {
    ggml_tensor * whole = made.tensor(GGML_TYPE_F32, n_k, strided ? 2 * n : n, m, 1);
    fill(whole, random);
    if (!strided) {
        return whole;
    }
    return ggml_view_3d(made.ctx.get(), whole, n_k, n, m, 2 * whole->nb[1], whole->nb[2], 0);
}

void make_matrix(Operator & made, const Shape & s, Random & random) {
    ggml_tensor * weight = made.tensor(s.type, s.n_k, s.n_rows, 1, 1);
    fill(weight, random);
    ggml_tensor * x = columns(made, random, s.n_k, s.n_tokens, s.n_sequences, s.strided);
    made.node       = ggml_mul_mat(made.ctx.get(), weight, x);
}

void make_mixture(Operator & made, const Shape & s, Random & random) {
    const int64_t n_experts = 1 + int64_t(random() % 6), n_used = 1 + int64_t(random() % uint64_t(n_experts));
    ggml_tensor * weights = made.tensor(s.type, s.n_k, s.n_rows, n_experts, 1);
    ggml_tensor * chosen  = made.tensor(GGML_TYPE_I32, n_used, s.n_tokens, 1, 1);
    fill(weights, random);
    const int skipped = any_skipped(random);
    for (int64_t i = 0; i < ggml_nelements(chosen); ++i) { // some experts have many tokens, others none
        const auto expert                       = int32_t(random() % uint64_t(n_experts) * (random() % 4 != 0));
        static_cast<int32_t *>(chosen->data)[i] = int(random() % 4) < skipped ? -1 : expert;
    }
    ggml_tensor * x = columns(made, random, s.n_k, random() % 2 ? 1 : n_used, s.n_tokens, s.strided);
    made.node       = ggml_mul_mat_id(made.ctx.get(), weights, x, chosen);
    made.node->op_params[OA_LAST_NOTHING_PARAM] = random() % 4 == 0;
}

Operator make(Random & random) {
    const Shape s = any_shape(random);
    Operator    made;
    if (random() % 2) {
        make_matrix(made, s, random);
    } else {
        make_mixture(made, s, random);
    }
    made.mark(OA_PRODUCTS_PARAM);
    return made;
}

std::string kind(const ggml_tensor * node) {
    return node->op == GGML_OP_MUL_MAT ? "matrix" : "mixture";
}

} // namespace

int main(int argc, char ** argv) {
    const Family products{ make, oa_products_takes, oa_products_use, kind, { "base", "avx2", "avx-vnni", "avx512" } };
    return run_family(products, argc, argv);
}
