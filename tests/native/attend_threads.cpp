// Our attention on random operators (kernel_threads.h).
#include "kernel_threads.h"
#include "own_attention.h"

#include <cmath>

namespace {

struct Shape {
    int64_t   n_tokens, n_kv, n_head, n_head_kv, d_k, d_v, n_sequences;
    ggml_type type_k, type_v;
    bool      masked, sinks, bias;
    float     softcap;
};

Shape any_shape(Random & random) {
    const int64_t   heads[][2] = { { 1, 1 }, { 4, 4 }, { 5, 1 }, { 8, 2 }, { 24, 8 }, { 16, 1 } };
    const int64_t   widths[]   = { 32, 64, 96, 128 };
    const ggml_type types[]    = { GGML_TYPE_F32, GGML_TYPE_F16, GGML_TYPE_BF16, GGML_TYPE_Q8_0, GGML_TYPE_Q4_0 };
    const auto &    head       = heads[random() % std::size(heads)];
    // Few rows are computed by dots, many by columns; a long cache is cut into parts.
    const int64_t n_tokens = random() % 2 ? 1 + random() % 4 : 8 + random() % 70;
    return { n_tokens,
             int64_t(1 + random() % 900),
             head[0],
             head[1],
             any_of(random, widths),
             any_of(random, widths),
             int64_t(1 + random() % 2),
             any_of(random, types),
             any_of(random, types),
             random() % 4 != 0,
             random() % 4 == 0,
             random() % 4 == 0,
             random() % 4 == 0 ? 20.0f : 0.0f };
}

// A causal mask, or one with holes; a token that sees nothing has zeros as its result.
void fill_mask(ggml_tensor * mask, Random & random) {
    auto *        to   = static_cast<ggml_fp16_t *>(mask->data);
    const int64_t n_kv = mask->ne[0], n_tokens = mask->ne[1], holes = random() % 2;
    for (int64_t i = 0; i < ggml_nelements(mask); ++i) {
        const int64_t at = i % n_kv, token = i / n_kv % n_tokens;
        const bool    seen = at <= n_kv - n_tokens + token && !(holes && random() % 2);
        to[i]              = ggml_fp32_to_fp16(seen ? 0.0f : -INFINITY);
    }
}

ggml_tensor * heads_of(ggml_context * ctx, ggml_tensor * cache, int64_t width, int64_t n_head) {
    ggml_tensor * rows = ggml_view_4d(ctx, cache, width, n_head, cache->ne[1], cache->ne[2],
                                      ggml_row_size(cache->type, width), cache->nb[1], cache->nb[2], 0);
    return ggml_permute(ctx, rows, 0, 2, 1, 3);
}

Operator make(Random & random) {
    const Shape    s = any_shape(random);
    Operator       made;
    ggml_context * ctx = made.ctx.get();
    ggml_tensor *  q   = made.tensor(GGML_TYPE_F32, s.d_k, s.n_head, s.n_tokens, s.n_sequences);
    ggml_tensor *  k   = made.tensor(s.type_k, s.d_k * s.n_head_kv, s.n_kv, s.n_sequences, 1);
    ggml_tensor *  v   = made.tensor(s.type_v, s.d_v * s.n_head_kv, s.n_kv, s.n_sequences, 1);
    fill(q, random);
    fill(k, random);
    fill(v, random);
    ggml_tensor * mask = nullptr;
    if (s.masked || s.bias) {
        mask = made.tensor(GGML_TYPE_F16, s.n_kv, s.n_tokens, 1, s.n_sequences);
        fill_mask(mask, random);
    }
    made.node = ggml_flash_attn_ext(ctx, ggml_permute(ctx, q, 0, 2, 1, 3), heads_of(ctx, k, s.d_k, s.n_head_kv),
                                    heads_of(ctx, v, s.d_v, s.n_head_kv), mask, 1.0f / std::sqrt(float(s.d_k)),
                                    s.bias ? 8.0f : 0.0f, s.softcap);
    if (s.sinks) {
        ggml_tensor * sinks = made.tensor(GGML_TYPE_F32, s.n_head, 1, 1, 1);
        fill(sinks, random);
        ggml_flash_attn_ext_add_sinks(made.node, sinks);
    }
    // Without waiting a row alone would be computed from a list that is not there yet: it could crash.
    const bool alone = !unwaited && s.n_sequences == 1 && random() % 2;
    made.mark(OA_ATTEND_PARAM, alone ? OA_ATTEND_ALONE : OA_ATTEND_TOGETHER);
    return made;
}

std::string kind(const ggml_tensor * node) {
    const std::string kernel = oa_attend_kernel(node);
    return kernel.substr(kernel.find(' ') + 1); // behind the instruction set
}

} // namespace

int main(int argc, char ** argv) {
    return run_family({ make, oa_attend_takes, oa_attend_use, kind, { "base", "avx2", "avx512" } }, argc, argv);
}
