// Our attention on random operators, for sanitizers: attend_threads ROUNDS [SEED [unwaited]].
// scripts/sanitize_attend.sh runs it. unwaited: threads do not wait for each other within an operator, and the bits may
// be anything: a control, in which ThreadSanitizer must find a race.
//
// Each operator is computed by one thread and by several, with every instruction set of this CPU; the bits must be the
// same. Every tensor and the working memory are allocations of their own size, so that a read beyond them shows.
#include "ggml-cpu.h"
#include "ggml.h"
#include "own_attention.h"

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

namespace {

bool unwaited = false;

} // namespace

extern "C" void __real_ggml_barrier(ggml_threadpool * pool);
extern "C" void __wrap_ggml_barrier(ggml_threadpool * pool) {
    if (!unwaited) {
        __real_ggml_barrier(pool);
    }
}

namespace {

using Random = std::mt19937;
using Memory = std::vector<std::unique_ptr<char[]>>;

template <typename T, size_t N> T any_of(Random & random, const T (&values)[N]) {
    return values[random() % N];
}

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

std::vector<float> normal(Random & random, int64_t n) {
    std::normal_distribution<float> values;
    std::vector<float>              made(static_cast<size_t>(n));
    for (float & value : made) {
        value = values(random);
    }
    return made;
}

void give_memory(ggml_tensor * tensor, Memory & memory) {
    memory.emplace_back(new char[ggml_nbytes(tensor)]);
    tensor->data = memory.back().get();
}

// Random values in the tensor's type.
void fill(ggml_tensor * tensor, Random & random) {
    const std::vector<float> values = normal(random, ggml_nelements(tensor));
    ggml_quantize_chunk(tensor->type, values.data(), tensor->data, 0, ggml_nrows(tensor), tensor->ne[0], nullptr);
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

struct Operator {
    std::unique_ptr<ggml_context, decltype(&ggml_free)> ctx{ nullptr, ggml_free };
    ggml_cgraph *                                       graph = nullptr;
    ggml_tensor *                                       node  = nullptr;
    Memory                                              memory;
};

ggml_tensor * heads_of(ggml_context * ctx, ggml_tensor * cache, int64_t width, int64_t n_head) {
    ggml_tensor * rows = ggml_view_4d(ctx, cache, width, n_head, cache->ne[1], cache->ne[2],
                                      ggml_row_size(cache->type, width), cache->nb[1], cache->nb[2], 0);
    return ggml_permute(ctx, rows, 0, 2, 1, 3);
}

Operator make(const Shape & s, Random & random) {
    Operator made;
    made.ctx.reset(ggml_init({ 32 * ggml_tensor_overhead() + ggml_graph_overhead(), nullptr, true }));
    ggml_context * ctx    = made.ctx.get();
    const auto     tensor = [&](ggml_type type, int64_t a, int64_t b, int64_t c, int64_t d) {
        ggml_tensor * one = ggml_new_tensor_4d(ctx, type, a, b, c, d);
        give_memory(one, made.memory);
        return one;
    };
    ggml_tensor * q = tensor(GGML_TYPE_F32, s.d_k, s.n_head, s.n_tokens, s.n_sequences);
    ggml_tensor * k = tensor(s.type_k, s.d_k * s.n_head_kv, s.n_kv, s.n_sequences, 1);
    ggml_tensor * v = tensor(s.type_v, s.d_v * s.n_head_kv, s.n_kv, s.n_sequences, 1);
    fill(q, random);
    fill(k, random);
    fill(v, random);
    ggml_tensor * mask = nullptr;
    if (s.masked || s.bias) {
        mask = tensor(GGML_TYPE_F16, s.n_kv, s.n_tokens, 1, s.n_sequences);
        fill_mask(mask, random);
    }
    made.node = ggml_flash_attn_ext(ctx, ggml_permute(ctx, q, 0, 2, 1, 3), heads_of(ctx, k, s.d_k, s.n_head_kv),
                                    heads_of(ctx, v, s.d_v, s.n_head_kv), mask, 1.0f / std::sqrt(float(s.d_k)),
                                    s.bias ? 8.0f : 0.0f, s.softcap);
    if (s.sinks) {
        ggml_tensor * sinks = tensor(GGML_TYPE_F32, s.n_head, 1, 1, 1);
        fill(sinks, random);
        ggml_flash_attn_ext_add_sinks(made.node, sinks);
    }
    made.node->op_params[OA_ATTEND_PARAM] = 1;
    give_memory(made.node, made.memory);
    made.graph = ggml_new_graph(ctx);
    ggml_build_forward_expand(made.graph, made.node);
    return made;
}

std::string computed(const Operator & made, int n_threads) {
    ggml_cplan                    plan = ggml_graph_plan(made.graph, n_threads, nullptr);
    const std::unique_ptr<char[]> work(new char[plan.work_size]);
    plan.work_data = reinterpret_cast<uint8_t *>(work.get());
    memset(made.node->data, 0xff, ggml_nbytes(made.node));
    if (ggml_graph_compute(made.graph, &plan) != GGML_STATUS_SUCCESS) {
        return {};
    }
    return { static_cast<const char *>(made.node->data), ggml_nbytes(made.node) };
}

} // namespace

int main(int argc, char ** argv) {
    const int rounds = argc > 1 ? atoi(argv[1]) : 100;
    Random    random(argc > 2 ? unsigned(atoi(argv[2])) : 1);
    int       dots = 0, columns = 0, refused = 0;
    unwaited = argc > 3 && !strcmp(argv[3], "unwaited");
    ggml_cpu_init();
    for (int round = 0; round < rounds; ++round) {
        const Operator made = make(any_shape(random), random);
        if (!oa_attend_takes(made.node)) {
            ++refused;
            continue;
        }
        for (const char * set : { "base", "avx2", "avx512" }) {
            if (!oa_attend_use(set)) {
                continue;
            }
            const std::string kernel = oa_attend_kernel(made.node);
            (kernel.find("dots") != std::string::npos ? dots : columns) += 1;
            const std::string alone = computed(made, 1), together = computed(made, 2 + int(random() % 4));
            if (!unwaited && (alone.empty() || alone != together)) {
                fprintf(stderr, "round %d, %s: threads change bits\n", round, kernel.c_str());
                return 1;
            }
        }
    }
    printf("{\"rounds\": %d, \"dots\": %d, \"columns\": %d, \"refused\": %d}\n", rounds, dots, columns, refused);
    return 0;
}
