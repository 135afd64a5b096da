// What the profiler times, built as llama.cpp builds it: same operators, types, strides and parameters. A case says how
// one copy of its cold operands, its inputs and one repeat are made, of one operator or of a chain of them; op_bench.h
// repeats and times it.
#pragma once

#include "ggml-backend.h"
#include "ggml-cpp.h"

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

struct oa_mul_mat_spec {
    std::string type;         // of the weight, "q4_K"
    int64_t     k        = 0; // row width of the weight
    int64_t     m        = 0; // rows of the weight
    int64_t     n_expert = 0; // 0: MUL_MAT, else MUL_MAT_ID
    int64_t     n_used   = 0; // experts per token
    int64_t     n_tokens = 1;
    std::string realisation; // "plain", "repacked", "tiled"; empty: what llama.cpp takes without accelerators
};

struct oa_attention_spec {
    std::string type_k     = "f16";
    std::string type_v     = "f16";
    int64_t     head_dim_k = 0;
    int64_t     head_dim_v = 0;
    int64_t     n_head     = 0;
    int64_t     n_head_kv  = 0;
    int64_t     n_tokens   = 1;
    int64_t     depth      = 0;      // KV rows attended to; llama.cpp's are multiples of 256
    bool        flash      = true;   // one fused operator, else K*q, softmax and V*p
    std::string kernel     = "ggml"; // of the fused operator on CPUs, or "oallama"
};

struct oa_small_spec {
    int64_t n_embd   = 0;
    int64_t n_tokens = 1;
};

// A chain of operators that a backend may compute in one piece; bench_chains.cpp has the kinds.
struct oa_chain_spec {
    std::string kind;         // "norm+mul", "rope+set_rows", "gate+up+glu"
    std::string type;         // of the weights, or of the K cache
    int64_t     ne0      = 0; // width of a norm's rows or of a head, or row width of the weights
    int64_t     ne1      = 0; // rows per token, heads, or rows of the weights
    int64_t     n_tokens = 1;
};

// What a node of a graph reads. nb: strides in bytes. cold: a weight or a state, of which every layer has its own.
struct oa_source_spec {
    std::string          type;
    std::vector<int64_t> ne;
    std::vector<size_t>  nb;
    bool                 cold = false;
};

// Any node of a model's graph, as graph_reader.h describes it. view_of: the source that the result is written to, -1
// for memory of its own.
struct oa_node_spec {
    std::string                 op;        // ggml's name of it
    std::vector<int32_t>        op_params; // ggml's, as whole numbers
    std::string                 type;
    std::vector<int64_t>        ne;
    std::vector<oa_source_spec> sources;
    int                         view_of  = -1;
    int64_t                     n_tokens = 1;
};

using oa_operands = std::vector<ggml_tensor *>;

// Where a repeat stands in its graph.
struct oa_repeat {
    ggml_context *      context;
    int                 index; // counts on from graph to graph
    const oa_operands & cold;
    const oa_operands & inputs;
    ggml_tensor *       before; // the result of the repeat before it in the graph; null for the first
};

class oa_bench_case {
  public:
    virtual ~oa_bench_case() = default;

    // The cold operands of one copy: weights or caches. Repeats take the copies in turn.
    virtual oa_operands new_cold(ggml_context *) const { return {}; }
    // What all repeats of all graphs share; `n_copies` of the cold operands there are.
    virtual oa_operands new_inputs(ggml_context * context, int n_copies) const = 0;
    // Adds a repeat's operators and returns the last of them, at most max_tensors with their views.
    virtual ggml_tensor * append(const oa_repeat & repeat) const = 0;

    // All copies lie in `buffer`.
    virtual void fill_cold(const std::vector<oa_operands> & copies, ggml_backend_buffer_t buffer) const;
    // They are zero before.
    virtual void fill_inputs(const oa_operands & inputs, int n_copies) const = 0;

    virtual int64_t n_tokens() const = 0;

    // Repeats that read a copy until nothing of it is unread: experts are read a few at a time.
    virtual int64_t n_visits() const { return 1; }

    // Whether a repeat reads the result of the one before, so that its memory is free again.
    virtual bool chained() const { return false; }

    // Whether a repeat leaves its cold operands as they are, so that other cases may read them.
    virtual bool only_reads_cold() const { return false; }

    // Whether its cold operands are weights, which a model on the CPU reads from its mapped file where they are plain.
    virtual bool reads_weights() const { return false; }
};

constexpr int oa_bench_max_tensors = 16; // of a repeat

// Throw std::invalid_argument for an unknown type.
std::unique_ptr<oa_bench_case> oa_mul_mat_case(const oa_mul_mat_spec & spec);
std::unique_ptr<oa_bench_case> oa_attention_case(const oa_attention_spec & spec);
// The small operators between the target operators (norms and residual adds) in turn, rows of n_embd values.
std::unique_ptr<oa_bench_case> oa_small_case(const oa_small_spec & spec);

// Throws std::invalid_argument for an unknown kind or type.
std::unique_ptr<oa_bench_case> oa_chain_case(const oa_chain_spec & spec);

// Throws std::invalid_argument for an unknown operator or type, and for sources that ggml has no room for.
std::unique_ptr<oa_bench_case> oa_node_case(const oa_node_spec & spec);

// For cases: ggml's type of that name; small valid data of any type; the same data in every weight of every copy.
ggml_type oa_parse_type(const std::string & name);
void      oa_fill(ggml_tensor * t);
void      oa_fill_weights(const std::vector<oa_operands> & copies, ggml_backend_buffer_t buffer);

ggml_context_ptr oa_bench_context(size_t n_tensors);

// A graph of `n` repeats from number `first` on, its nodes without memory. Each repeat takes the next of the copies.
struct oa_bench_graph {
    ggml_context_ptr context;
    ggml_cgraph *    graph;
    uint64_t         uid; // as the scheduler's graphs have one: a backend that knows it need not compare the nodes
};

oa_bench_graph oa_repeat_case(const oa_bench_case & which, const std::vector<oa_operands> & copies,
                              const oa_operands & inputs, int first, int n);

// Two repeats (the small operators take turns) and their operands, nothing of them in memory: what would be timed.
struct oa_built_case {
    ggml_context_ptr operands;
    oa_bench_graph   repeats;
};

oa_built_case oa_build_case(const oa_bench_case & which);
