// Chains of operators that a backend may compute in one piece, as llama.cpp builds them.

#include "bench_cases.h"
#include "ggml.h"

#include <algorithm>
#include <numeric>
#include <stdexcept>

namespace {

// A norm and the multiplication with its weight: rows of `width` values, `rows` of them per token.
class norm_case : public oa_bench_case {
  public:
    explicit norm_case(const oa_chain_spec & spec) : spec_(spec) {}

    int64_t n_tokens() const override { return spec_.n_tokens; }

    bool chained() const override { return true; }

    oa_operands new_inputs(ggml_context * ctx, int /* n_copies */) const override {
        return { ggml_new_tensor_3d(ctx, GGML_TYPE_F32, spec_.ne0, spec_.ne1, spec_.n_tokens),
                 ggml_new_tensor_1d(ctx, GGML_TYPE_F32, spec_.ne0) };
    }

    ggml_tensor * append(const oa_repeat & r) const override {
        ggml_tensor * norm = ggml_rms_norm(r.context, r.before ? r.before : r.inputs[0], 1e-5f);
        return ggml_mul(r.context, norm, r.inputs[1]);
    }

    void fill_inputs(const oa_operands & inputs, int /* n_copies */) const override {
        oa_fill(inputs[0]);
        oa_fill(inputs[1]);
    }

  private:
    oa_chain_spec spec_;
};

// RoPE of the keys of ne1 heads, ne0 values wide, and the write to the KV cache.
class rope_store_case : public oa_bench_case {
  public:
    explicit rope_store_case(const oa_chain_spec & spec) : spec_(spec), type_(oa_parse_type(spec.type)) {}

    int64_t n_tokens() const override { return spec_.n_tokens; }

    oa_operands new_inputs(ggml_context * ctx, int /* n_copies */) const override {
        return { ggml_new_tensor_3d(ctx, GGML_TYPE_F32, spec_.ne0, spec_.ne1, spec_.n_tokens),
                 ggml_new_tensor_1d(ctx, GGML_TYPE_I32, spec_.n_tokens), // positions
                 ggml_new_tensor_1d(ctx, GGML_TYPE_I64, spec_.n_tokens), // rows of the cache
                 ggml_new_tensor_2d(ctx, type_, spec_.ne0 * spec_.ne1, std::max<int64_t>(spec_.n_tokens, n_rows)) };
    }

    ggml_tensor * append(const oa_repeat & r) const override {
        ggml_context * ctx = r.context;
        ggml_tensor *  k = ggml_rope_ext(ctx, r.inputs[0], r.inputs[1], nullptr, int(spec_.ne0), GGML_ROPE_TYPE_NEOX, 0,
                                         10000.0f, 1.0f, 0.0f, 1.0f, 32.0f, 1.0f);
        ggml_tensor *  row = ggml_view_2d(ctx, k, spec_.ne0 * spec_.ne1, spec_.n_tokens, k->nb[2], 0);
        return ggml_set_rows(ctx, r.inputs[3], row, r.inputs[2]);
    }

    void fill_inputs(const oa_operands & inputs, int /* n_copies */) const override {
        std::vector<int32_t> positions(spec_.n_tokens);
        std::vector<int64_t> rows(spec_.n_tokens);
        std::iota(positions.begin(), positions.end(), 0);
        std::iota(rows.begin(), rows.end(), 0);
        oa_fill(inputs[0]);
        ggml_backend_tensor_set(inputs[1], positions.data(), 0, ggml_nbytes(inputs[1]));
        ggml_backend_tensor_set(inputs[2], rows.data(), 0, ggml_nbytes(inputs[2]));
    }

  private:
    static constexpr int64_t n_rows = 256;

    oa_chain_spec spec_;
    ggml_type     type_;
};

// Gate and up of a feed-forward, k = ne0 to m = ne1, and SwiGLU.
class feed_forward_case : public oa_bench_case {
  public:
    explicit feed_forward_case(const oa_chain_spec & spec) : spec_(spec), type_(oa_parse_type(spec.type)) {}

    int64_t n_tokens() const override { return spec_.n_tokens; }

    oa_operands new_cold(ggml_context * ctx) const override {
        return { ggml_new_tensor_2d(ctx, type_, spec_.ne0, spec_.ne1),
                 ggml_new_tensor_2d(ctx, type_, spec_.ne0, spec_.ne1) };
    }

    oa_operands new_inputs(ggml_context * ctx, int /* n_copies */) const override {
        return { ggml_new_tensor_2d(ctx, GGML_TYPE_F32, spec_.ne0, spec_.n_tokens) };
    }

    ggml_tensor * append(const oa_repeat & r) const override {
        ggml_tensor * gate = ggml_mul_mat(r.context, r.cold[0], r.inputs[0]);
        ggml_tensor * up   = ggml_mul_mat(r.context, r.cold[1], r.inputs[0]);
        return ggml_swiglu_split(r.context, gate, up);
    }

    void fill_cold(const std::vector<oa_operands> & copies, ggml_backend_buffer_t buffer) const override {
        oa_fill_weights(copies, buffer);
    }

    void fill_inputs(const oa_operands & inputs, int /* n_copies */) const override { oa_fill(inputs[0]); }

  private:
    oa_chain_spec spec_;
    ggml_type     type_;
};

} // namespace

std::unique_ptr<oa_bench_case> oa_chain_case(const oa_chain_spec & spec) {
    if (spec.kind == "norm+mul") {
        return std::make_unique<norm_case>(spec);
    }
    if (spec.kind == "rope+set_rows") {
        return std::make_unique<rope_store_case>(spec);
    }
    if (spec.kind == "gate+up+glu") {
        return std::make_unique<feed_forward_case>(spec);
    }
    throw std::invalid_argument("unknown chain '" + spec.kind + "'");
}
