// Our products with few columns on random operators, for sanitizers: thin_threads ROUNDS [SEED [unwaited]].
// scripts/sanitize_attend.sh runs it. unwaited: threads do not wait for each other within an operator, and the bits may
// be anything: a control, in which ThreadSanitizer must find a race.
//
// Each operator is computed by one thread and by several; the bits must be the same. Every tensor and the working
// memory are allocations of their own size, so that a read beyond them shows.
#include "ggml-cpu.h"
#include "ggml.h"
#include "own_products.h"
#include "thin_products.h"

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

struct Operator {
    std::unique_ptr<ggml_context, decltype(&ggml_free)> ctx{ nullptr, ggml_free };
    ggml_cgraph *                                       graph = nullptr;
    ggml_tensor *                                       node  = nullptr;
    Memory                                              memory;
};

void give_memory(ggml_tensor * tensor, Memory & memory) {
    memory.emplace_back(new char[ggml_nbytes(tensor)]);
    tensor->data = memory.back().get();
}

// Random values in the tensor's type.
void fill(ggml_tensor * tensor, Random & random) {
    std::normal_distribution<float> normal;
    std::vector<float>              values(size_t(ggml_nelements(tensor)));
    for (float & value : values) {
        value = normal(random);
    }
    ggml_quantize_chunk(tensor->type, values.data(), tensor->data, 0, ggml_nrows(tensor), tensor->ne[0], nullptr);
}

Operator make(Random & random) {
    const ggml_type types[] = { GGML_TYPE_Q4_0, GGML_TYPE_Q8_0, GGML_TYPE_Q4_K, GGML_TYPE_Q6_K };
    const ggml_type type    = types[random() % 4];
    const bool      mixture = random() % 2;
    const int64_t   k = 256 * int64_t(1 + random() % 5), n_rows = int64_t(1 + random() % 300);
    const int64_t   n_experts = mixture ? int64_t(1 + random() % 6) : 1, n_used = int64_t(1 + random() % n_experts);
    const int64_t   n_columns = mixture ? (random() % 2 ? 1 : n_used) : int64_t(1 + random() % 7);
    const int64_t   n_tokens  = mixture ? int64_t(1 + random() % 2) : 1;
    Operator        made;
    made.ctx.reset(ggml_init({ 8 * ggml_tensor_overhead() + ggml_graph_overhead(), nullptr, true }));
    ggml_context * ctx     = made.ctx.get();
    ggml_tensor *  weight  = ggml_new_tensor_3d(ctx, type, k, n_rows, n_experts);
    ggml_tensor *  columns = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, k, n_columns, n_tokens);
    give_memory(weight, made.memory);
    give_memory(columns, made.memory);
    fill(weight, random);
    fill(columns, random);
    if (mixture) {
        ggml_tensor * ids = ggml_new_tensor_2d(ctx, GGML_TYPE_I32, n_used, n_tokens);
        give_memory(ids, made.memory);
        for (int64_t i = 0; i < n_used * n_tokens; ++i) {
            static_cast<int32_t *>(ids->data)[i] = int32_t(random() % n_experts);
        }
        made.node = ggml_mul_mat_id(ctx, weight, columns, ids);
    } else {
        made.node = ggml_mul_mat(ctx, weight, columns);
    }
    made.node->op_params[OA_PRODUCTS_PARAM] = 1;
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
    int       dense = 0, mixtures = 0, refused = 0;
    unwaited = argc > 3 && !strcmp(argv[3], "unwaited");
    ggml_cpu_init();
    for (int round = 0; round < rounds; ++round) {
        const Operator made = make(random);
        if (!oa_thin_takes(made.node)) {
            ++refused;
            continue;
        }
        (made.node->op == GGML_OP_MUL_MAT ? dense : mixtures) += 1;
        const std::string alone = computed(made, 1), together = computed(made, 2 + int(random() % 4));
        if (!unwaited && (alone.empty() || alone != together)) {
            fprintf(stderr, "round %d: threads change bits\n", round);
            return 1;
        }
    }
    printf("{\"rounds\": %d, \"dense\": %d, \"mixtures\": %d, \"refused\": %d}\n", rounds, dense, mixtures, refused);
    return 0;
}
