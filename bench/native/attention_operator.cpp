// One attention operator, computed by one thread with AVX2, for cachegrind (bench/attention_counts.py).
//     attention_operator TIMES FORM TYPE N_HEAD N_HEAD_KV WIDTH N_TOKENS DEPTH
// FORM: ggml's `fused` or `unfused`, or `ours`. TYPE: of K and V. Computes it TIMES times, also not at all, and prints
// the kernel. The operator is that of csrc/probe/bench_cases.cpp.
#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml-cpu.h"
#include "ggml.h"
#include "own_attention.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

namespace {

struct Shape {
    ggml_type type;
    int64_t   n_head, n_head_kv, width, n_tokens, depth;
};

struct Operands {
    ggml_tensor *q, *k, *v, *mask;
};

ggml_type type_of(const char * name) {
    for (int i = 0; i < GGML_TYPE_COUNT; ++i) {
        if (const char * known = ggml_type_name(ggml_type(i)); known && !strcmp(name, known)) {
            return ggml_type(i);
        }
    }
    return GGML_TYPE_COUNT;
}

// V of the unfused form is transposed.
Operands new_operands(ggml_context * ctx, const Shape & s, bool fused) {
    const int64_t row = s.width * s.n_head_kv;
    return { ggml_new_tensor_3d(ctx, GGML_TYPE_F32, s.width, s.n_head, s.n_tokens),
             ggml_new_tensor_2d(ctx, s.type, row, s.depth),
             ggml_new_tensor_2d(ctx, s.type, fused ? row : s.depth, fused ? s.depth : row),
             ggml_new_tensor_2d(ctx, fused ? GGML_TYPE_F16 : GGML_TYPE_F32, s.depth, s.n_tokens) };
}

ggml_tensor * heads_of(ggml_context * ctx, ggml_tensor * cache, const Shape & s) {
    ggml_tensor * rows =
        ggml_view_3d(ctx, cache, s.width, s.n_head_kv, s.depth, ggml_row_size(cache->type, s.width), cache->nb[1], 0);
    return ggml_permute(ctx, rows, 0, 2, 1, 3);
}

ggml_tensor * new_operator(ggml_context * ctx, const Shape & s, const Operands & o, const std::string & form) {
    ggml_tensor * q     = ggml_permute(ctx, o.q, 0, 2, 1, 3);
    ggml_tensor * k     = heads_of(ctx, o.k, s);
    const float   scale = 1.0f / std::sqrt(float(s.width));
    if (form == "unfused") {
        ggml_tensor * scores = ggml_mul_mat(ctx, k, q);
        ggml_prec_set_acc(scores, GGML_PREC_F32);
        // In place, as llama.cpp's allocator lays them out.
        ggml_tensor * weights = ggml_soft_max_ext_inplace(ctx, scores, o.mask, scale, 0.0f);
        return ggml_mul_mat(ctx, ggml_reshape_3d(ctx, o.v, s.depth, s.width, s.n_head_kv), weights);
    }
    ggml_tensor * op = ggml_flash_attn_ext(ctx, q, k, heads_of(ctx, o.v, s), o.mask, scale, 0.0f, 0.0f);
    ggml_prec_set_acc(op, GGML_PREC_F32);
    op->op_params[OA_ATTEND_PARAM] = form == "ours";
    return op;
}

// A few random rows, repeated.
void fill(ggml_tensor * tensor) {
    const int64_t                   n_rows = std::min<int64_t>(ggml_nrows(tensor), 16);
    std::vector<float>              values(size_t(n_rows * tensor->ne[0]));
    std::mt19937                    random(42);
    std::normal_distribution<float> normal;
    std::generate(values.begin(), values.end(), [&] { return normal(random); });
    char * const to   = static_cast<char *>(tensor->data);
    const size_t some = ggml_quantize_chunk(tensor->type, values.data(), to, 0, n_rows, tensor->ne[0], nullptr);
    for (size_t at = some; at < ggml_nbytes(tensor); at += some) {
        memcpy(to + at, to, std::min(some, ggml_nbytes(tensor) - at));
    }
}

// The tokens are the last of the cache; each sees what is before it, and itself.
void fill_mask(ggml_tensor * mask) {
    const int64_t      n_kv = mask->ne[0], n_tokens = mask->ne[1];
    std::vector<float> values(size_t(n_kv * n_tokens), 0.0f);
    for (int64_t token = 0; token < n_tokens; ++token) {
        const auto row = values.begin() + token * n_kv;
        std::fill(row + n_kv - n_tokens + token + 1, row + n_kv, -INFINITY);
    }
    ggml_quantize_chunk(mask->type, values.data(), mask->data, 0, n_tokens, n_kv, nullptr);
}

int run(int times, const Shape & s, const std::string & form) {
    ggml_context * ctx   = ggml_init({ 32 * ggml_tensor_overhead() + ggml_graph_overhead(), nullptr, true });
    const Operands o     = new_operands(ctx, s, form != "unfused");
    ggml_tensor *  op    = new_operator(ctx, s, o, form);
    ggml_cgraph *  graph = ggml_new_graph(ctx);
    ggml_build_forward_expand(graph, op);
    ggml_backend_buffer_t buffer = ggml_backend_alloc_ctx_tensors_from_buft(ctx, ggml_backend_cpu_buffer_type());
    const bool            ours   = form == "ours";
    if (!buffer || (ours && !(oa_attend_use("avx2") && oa_attend_takes(op)))) {
        fprintf(stderr, "attention_operator: no memory, no AVX2, or no kernel\n");
        return 1;
    }
    fill(o.q);
    fill(o.k);
    fill(o.v);
    fill_mask(o.mask);
    ggml_cplan           plan = ggml_graph_plan(graph, 1, nullptr);
    std::vector<uint8_t> work(plan.work_size);
    plan.work_data = work.data();
    for (int i = 0; i < times; ++i) {
        ggml_graph_compute(graph, &plan);
    }
    printf("%s\n", ours ? oa_attend_kernel(op) : "ggml");
    ggml_backend_buffer_free(buffer);
    ggml_free(ctx);
    return 0;
}

} // namespace

int main(int argc, char ** argv) {
    const std::string form = argc == 9 ? argv[2] : "";
    if ((form != "fused" && form != "unfused" && form != "ours") || type_of(argv[3]) == GGML_TYPE_COUNT) {
        fprintf(stderr,
                "usage: attention_operator TIMES fused|unfused|ours TYPE N_HEAD N_HEAD_KV WIDTH N_TOKENS DEPTH\n");
        return 2;
    }
    ggml_cpu_init();
    return run(atoi(argv[1]),
               { type_of(argv[3]), atoll(argv[4]), atoll(argv[5]), atoll(argv[6]), atoll(argv[7]), atoll(argv[8]) },
               form);
}
