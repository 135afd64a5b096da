// Profiler of target operators and attention: one shape on one device, many repeats inside one graph over rotating
// copies larger than the caches (decode reads cold weights). Timed from the host around whole graphs: timing single
// GPU operators from the host overstates them 1.7 to 3 times.
#pragma once

#include "bench_backend.h"

#include <cstdint>

struct oa_mul_mat_spec {
    std::string type;         // of the weight, "q4_K"
    int64_t     k        = 0; // row width of the weight
    int64_t     m        = 0; // rows of the weight
    int64_t     n_expert = 0; // 0: MUL_MAT, else MUL_MAT_ID
    int64_t     n_used   = 0; // experts per token
    int64_t     n_tokens = 1;
    std::string realisation; // "plain", "repacked"; empty: what llama.cpp takes on a machine without accelerators
};

struct oa_attention_spec {
    std::string type_k     = "f16";
    std::string type_v     = "f16";
    int64_t     head_dim_k = 0;
    int64_t     head_dim_v = 0;
    int64_t     n_head     = 0;
    int64_t     n_head_kv  = 0;
    int64_t     n_tokens   = 1;
    int64_t     depth      = 0;    // KV rows attended to
    bool        flash      = true; // where the device supports it, as in llama.cpp
};

// Whether a buffer type of `device` repacks such a weight for its operator. Throws std::invalid_argument for an unknown
// device or type.
bool oa_repacks(const std::string & device, const oa_mul_mat_spec & spec);

class oa_op_bench {
  public:
    // `cold_bytes`: size the rotating copies must exceed together (twice the last-level cache is a good choice).
    oa_op_bench(const std::string & device, int n_threads, bool use_extra_bufts, size_t cold_bytes);

    // Throws std::invalid_argument for an unknown type and std::runtime_error if the device lacks the operator, memory
    // or the realisation.
    oa_timing mul_mat(const oa_mul_mat_spec & spec, double max_s);
    oa_timing attention(const oa_attention_spec & spec, double max_s);

    // One of the small operators between the target operators (norms and residual adds), rows of n_embd values.
    oa_timing small(int64_t n_embd, int64_t n_tokens, double max_s);

    // Name of the buffer type the last weight lay in ("CPU_REPACK").
    const std::string & buffer_type() const { return buffer_type_; }

  private:
    // A graph of n operators with its tensors allocated and filled.
    struct prepared {
        ggml_context_ptr        context;
        ggml_backend_buffer_ptr buffer;
        ggml_cgraph *           graph;
    };
    using builder = std::function<prepared(int n_ops)>;

    // Times one operator, then at least `min_ops` in one graph and as many as make launching negligible.
    oa_timing measure(const builder & build, int min_ops, int max_ops, double max_s);
    size_t    cold_bytes(int64_t n_tokens) const;
    prepared  allocate_graph(ggml_context_ptr context, ggml_cgraph * graph);
    void      require_support(const ggml_tensor * op) const;
    bool      supports_flash(const oa_attention_spec & spec, ggml_type type_k, ggml_type type_v) const;

    ggml_backend_dev_t device_;
    ggml_backend_ptr   backend_;
    bool               use_extra_bufts_;
    size_t             cold_bytes_;
    std::string        buffer_type_;
};
