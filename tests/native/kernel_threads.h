// What attend_threads.cpp and its like share: random operators of a family of our kernels, for sanitizers.
// FAMILY_threads ROUNDS [SEED [unwaited]], by scripts/sanitize_kernels.sh. unwaited: threads do not wait for each other
// within an operator, and the bits may be anything: a control, in which ThreadSanitizer must find a race.
//
// Each operator is computed by one thread and by several, with every instruction set of this CPU; the bits must be the
// same. Every tensor and the working memory are allocations of their own size, so that a read beyond them shows.
#pragma once

#include "ggml-cpu.h"
#include "ggml.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
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

// Of four choices of a mixture's experts, how many are skipped: mostly none, sometimes all.
inline int any_skipped(Random & random) {
    const int numbers[] = { 0, 0, 1, 2, 4 };
    return any_of(random, numbers);
}

// A graph of one operator.
struct Operator {
    std::unique_ptr<ggml_context, decltype(&ggml_free)> ctx{ nullptr, ggml_free };
    ggml_cgraph *                                       graph = nullptr;
    ggml_tensor *                                       node  = nullptr;
    Memory                                              memory;

    Operator() { ctx.reset(ggml_init({ 32 * ggml_tensor_overhead() + ggml_graph_overhead(), nullptr, true })); }

    ggml_tensor * tensor(ggml_type type, int64_t a, int64_t b, int64_t c, int64_t d) {
        ggml_tensor * one = ggml_new_tensor_4d(ctx.get(), type, a, b, c, d);
        give_memory(one);
        return one;
    }

    // The node is whole: `param` of its parameters is the mark.
    void mark(int param, int32_t mark = 1) {
        node->op_params[param] = mark;
        give_memory(node);
        graph = ggml_new_graph(ctx.get());
        ggml_build_forward_expand(graph, node);
    }

  private:
    void give_memory(ggml_tensor * one) {
        memory.emplace_back(new char[ggml_nbytes(one)]);
        one->data = memory.back().get();
    }
};

// Random values in the tensor's type.
inline void fill(ggml_tensor * tensor, Random & random) {
    std::normal_distribution<float> values;
    std::vector<float>              made(size_t(ggml_nelements(tensor)));
    for (float & value : made) {
        value = values(random);
    }
    ggml_quantize_chunk(tensor->type, made.data(), tensor->data, 0, ggml_nrows(tensor), tensor->ne[0], nullptr);
}

inline std::string computed(const Operator & made, int n_threads) {
    ggml_cplan                    plan = ggml_graph_plan(made.graph, n_threads, nullptr);
    const std::unique_ptr<char[]> work(new char[plan.work_size]);
    plan.work_data = reinterpret_cast<uint8_t *>(work.get());
    memset(made.node->data, 0xff, ggml_nbytes(made.node));
    if (ggml_graph_compute(made.graph, &plan) != GGML_STATUS_SUCCESS) {
        return {};
    }
    return { static_cast<const char *>(made.node->data), ggml_nbytes(made.node) };
}

// A family of kernels. kind: what is counted of an operator that has a kernel.
struct Family {
    Operator (*make)(Random & random);
    bool (*takes)(const ggml_tensor * node);
    bool (*use)(const char * instruction_set);
    std::string (*kind)(const ggml_tensor * node);
    std::vector<const char *> instruction_sets;
};

// Prints the rounds and how many operators there were of every kind.
inline int run_family(const Family & family, int argc, char ** argv) {
    const int                  rounds = argc > 1 ? atoi(argv[1]) : 100;
    Random                     random(argc > 2 ? unsigned(atoi(argv[2])) : 1);
    std::map<std::string, int> kinds;
    int                        refused = 0;
    unwaited                           = argc > 3 && !strcmp(argv[3], "unwaited");
    ggml_cpu_init();
    for (int round = 0; round < rounds; ++round) {
        const Operator made = family.make(random);
        if (!family.takes(made.node)) {
            ++refused;
            continue;
        }
        for (const char * set : family.instruction_sets) {
            if (!family.use(set)) {
                continue;
            }
            const std::string kind = family.kind(made.node);
            kinds[kind] += 1;
            const std::string alone = computed(made, 1), together = computed(made, 2 + int(random() % 4));
            if (!unwaited && (alone.empty() || alone != together)) {
                fprintf(stderr, "round %d, %s, %s: threads change bits\n", round, kind.c_str(), set);
                return 1;
            }
        }
    }
    printf("{\"rounds\": %d, \"refused\": %d", rounds, refused);
    for (const auto & [kind, number] : kinds) {
        printf(", \"%s\": %d", kind.c_str(), number);
    }
    printf("}\n");
    return 0;
}

} // namespace
