#include "bench_cases.h"

#include "own_attention.h"
#include "own_products.h"

#include "ggml-impl.h" // ggml_graph_next_uid
#include "ggml.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>
#include <stdexcept>

namespace {

constexpr size_t  largest_piece = 8u << 20;
constexpr int64_t n_choices     = 4; // of experts, that the batches of a copy take in turn

// Small valid data of any type: quantised from a few random rows, repeated to the tensor's size.
std::vector<uint8_t> make_data(const ggml_tensor * t) {
    const int64_t        n_rows = std::min<int64_t>(ggml_nrows(t), 16);
    const size_t         row    = ggml_row_size(t->type, t->ne[0]);
    std::vector<float>   values(t->ne[0] * n_rows);
    std::vector<uint8_t> tile(row * n_rows), data(ggml_nbytes(t));

    std::mt19937                    rng(42);
    std::normal_distribution<float> normal(0.0f, 1.0f / std::sqrt(float(t->ne[0])));
    std::generate(values.begin(), values.end(), [&] { return normal(rng); });
    if (t->type == GGML_TYPE_F32) {
        std::copy_n(reinterpret_cast<const uint8_t *>(values.data()), tile.size(), tile.begin());
    } else {
        const std::vector<float> importance(t->ne[0], 1.0f); // the i-quants insist on a matrix
        ggml_quantize_chunk(t->type, values.data(), tile.data(), 0, n_rows, t->ne[0], importance.data());
    }
    for (size_t at = 0; at < data.size(); at += tile.size()) {
        std::copy_n(tile.begin(), std::min(tile.size(), data.size() - at), data.begin() + at);
    }
    return data;
}

// The same random values in every copy. Rows and positions, which are integers, stay as they are.
void fill_copies(const std::vector<oa_operands> & copies) {
    for (size_t i = 0; i < copies[0].size(); ++i) {
        ggml_tensor * first = copies[0][i];
        if (first->type == GGML_TYPE_I32 || first->type == GGML_TYPE_I64) {
            continue;
        }
        const auto data = make_data(first);
        // The CPU's buffers that repack want a whole weight. RPC reads what is longer than 10 MiB twice, for a
        // checksum; a device copies within its own memory faster.
        ggml_backend_dev_t device = ggml_backend_buft_get_device(ggml_backend_buffer_get_type(first->buffer));
        const bool         own    = device && ggml_backend_dev_type(device) != GGML_BACKEND_DEVICE_TYPE_CPU;
        const size_t       piece  = own ? largest_piece : data.size();
        for (size_t copy = 0; copy < (own ? 1 : copies.size()); ++copy) {
            for (size_t begin = 0; begin < data.size(); begin += piece) {
                ggml_backend_tensor_set(copies[copy][i], data.data() + begin, begin,
                                        std::min(piece, data.size() - begin));
            }
        }
        for (size_t copy = 1; own && copy < copies.size(); ++copy) {
            ggml_backend_tensor_copy(first, copies[copy][i]);
        }
    }
}

// Chooses experts as a router might. Decode deals them like cards, all of a copy before any comes back: its next reads
// are the coldest. The tokens of a batch choose independently of each other.
class router {
  public:
    explicit router(int64_t n_expert) : experts_(n_expert), next_(n_expert) {
        std::iota(experts_.begin(), experts_.end(), 0);
    }

    void fill(ggml_tensor * ids) {
        const int64_t        n_used = ids->ne[0], n_tokens = ids->ne[1];
        std::vector<int32_t> values;
        for (int64_t token = 0; token < n_tokens; ++token) {
            if (n_tokens > 1 || next_ + n_used > int64_t(experts_.size())) {
                std::shuffle(experts_.begin(), experts_.end(), rng_);
                next_ = 0;
            }
            values.insert(values.end(), experts_.begin() + next_, experts_.begin() + next_ + n_used);
            next_ += n_used;
        }
        ggml_backend_tensor_set(ids, values.data(), 0, ggml_nbytes(ids));
    }

  private:
    std::vector<int32_t> experts_;
    int64_t              next_;
    std::mt19937         rng_{ 7 };
};

class mul_mat_case : public oa_bench_case {
  public:
    explicit mul_mat_case(const oa_mul_mat_spec & spec) : spec_(spec), type_(oa_parse_type(spec.type)) {}

    bool reads_weights() const override { return true; }

    bool only_reads_cold() const override { return true; }

    int64_t n_tokens() const override { return spec_.n_tokens; }

    int64_t n_visits() const override {
        const int64_t n_rows = spec_.n_tokens * std::max<int64_t>(1, spec_.n_used);
        return moe() ? std::max<int64_t>(1, spec_.n_expert / n_rows) : 1;
    }

    oa_operands new_cold(ggml_context * ctx) const override {
        return { moe() ? ggml_new_tensor_3d(ctx, type_, spec_.k, spec_.m, spec_.n_expert) :
                         ggml_new_tensor_2d(ctx, type_, spec_.k, spec_.m) };
    }

    // The activations, then the choices of experts: repeat i, of copy i % n_copies, takes the i-th of them in turn.
    oa_operands new_inputs(ggml_context * ctx, int n_copies) const override {
        if (!moe()) {
            return { ggml_new_tensor_2d(ctx, GGML_TYPE_F32, spec_.k, spec_.n_tokens) };
        }
        oa_operands inputs{ ggml_new_tensor_3d(ctx, GGML_TYPE_F32, spec_.k, 1, spec_.n_tokens) };
        for (int64_t i = 0; i < n_copies * std::max(n_visits(), n_choices); ++i) {
            inputs.push_back(ggml_new_tensor_2d(ctx, GGML_TYPE_I32, spec_.n_used, spec_.n_tokens));
        }
        return inputs;
    }

    ggml_tensor * append(const oa_repeat & r) const override {
        ggml_tensor * ids                = moe() ? r.inputs[1 + size_t(r.index) % (r.inputs.size() - 1)] : nullptr;
        ggml_tensor * op                 = ids ? ggml_mul_mat_id(r.context, r.cold[0], r.inputs[0], ids) :
                                                 ggml_mul_mat(r.context, r.cold[0], r.inputs[0]);
        op->op_params[OA_PRODUCTS_PARAM] = spec_.realisation == "tiled";
        return op;
    }

    void fill_cold(const std::vector<oa_operands> & copies, ggml_backend_buffer_t buffer) const override {
        oa_fill_weights(copies, buffer);
    }

    void fill_inputs(const oa_operands & inputs, int n_copies) const override {
        oa_fill(inputs[0]);
        std::vector<router> routers(moe() ? n_copies : 0, router(spec_.n_expert));
        for (size_t i = 1; i < inputs.size(); ++i) {
            routers[(i - 1) % n_copies].fill(inputs[i]);
        }
    }

  private:
    bool moe() const { return spec_.n_expert > 0; }

    oa_mul_mat_spec spec_;
    ggml_type       type_;
};

// What each token may see: all rows up to its own, the last token the last row. On CPUs fused attention skips the rest.
void fill_mask(ggml_tensor * mask) {
    const int64_t      n_kv = mask->ne[0], n_tokens = mask->ne[1];
    std::vector<float> values(n_kv * n_tokens, 0.0f);
    for (int64_t token = 0; token < n_tokens; ++token) {
        const int64_t seen = std::max<int64_t>(1, n_kv - n_tokens + token + 1);
        std::fill(values.begin() + token * n_kv + seen, values.begin() + (token + 1) * n_kv, -INFINITY);
    }
    std::vector<ggml_fp16_t> halves(mask->type == GGML_TYPE_F16 ? values.size() : 0);
    ggml_fp32_to_fp16_row(values.data(), halves.data(), int64_t(halves.size()));
    ggml_backend_tensor_set(mask, halves.empty() ? (const void *) values.data() : halves.data(), 0, ggml_nbytes(mask));
}

// A cache [head_dim * n_head, n_kv] as attention reads it: [head_dim, n_kv, n_head], strided.
ggml_tensor * heads_of(ggml_context * ctx, ggml_tensor * cache, int64_t head_dim, int64_t n_head) {
    ggml_tensor * rows =
        ggml_view_3d(ctx, cache, head_dim, n_head, cache->ne[1], ggml_row_size(cache->type, head_dim), cache->nb[1], 0);
    return ggml_permute(ctx, rows, 0, 2, 1, 3);
}

// llm_graph_context::build_attn_mha without what few models have: ALiBi, a soft cap of the scores, sinks, sparse masks.
class attention_case : public oa_bench_case {
  public:
    explicit attention_case(const oa_attention_spec & spec) :
        spec_(spec), type_k_(oa_parse_type(spec.type_k)), type_v_(oa_parse_type(spec.type_v)) {}

    bool only_reads_cold() const override { return true; }

    int64_t n_tokens() const override { return spec_.n_tokens; }

    // Rows of all heads together, as in llama.cpp's cache; without flash attention V is transposed.
    oa_operands new_cold(ggml_context * ctx) const override {
        const int64_t k = spec_.head_dim_k * spec_.n_head_kv, v = spec_.head_dim_v * spec_.n_head_kv;
        return { ggml_new_tensor_2d(ctx, type_k_, k, spec_.depth),
                 spec_.flash ? ggml_new_tensor_2d(ctx, type_v_, v, spec_.depth) :
                               ggml_new_tensor_2d(ctx, type_v_, spec_.depth, v) };
    }

    oa_operands new_inputs(ggml_context * ctx, int /* n_copies */) const override {
        return { ggml_new_tensor_3d(ctx, GGML_TYPE_F32, spec_.head_dim_k, spec_.n_head, spec_.n_tokens),
                 ggml_new_tensor_2d(ctx, spec_.flash ? GGML_TYPE_F16 : GGML_TYPE_F32, spec_.depth, spec_.n_tokens) };
    }

    ggml_tensor * append(const oa_repeat & r) const override {
        ggml_context * ctx   = r.context;
        ggml_tensor *  q     = ggml_permute(ctx, r.inputs[0], 0, 2, 1, 3);
        ggml_tensor *  k     = heads_of(ctx, r.cold[0], spec_.head_dim_k, spec_.n_head_kv);
        ggml_tensor *  v     = r.cold[1];
        ggml_tensor *  mask  = r.inputs[1];
        const float    scale = 1.0f / std::sqrt(float(spec_.head_dim_k));
        if (spec_.flash) {
            v                = heads_of(ctx, v, spec_.head_dim_v, spec_.n_head_kv);
            ggml_tensor * op = ggml_flash_attn_ext(ctx, q, k, v, mask, scale, 0.0f, 0.0f);
            ggml_prec_set_acc(op, GGML_PREC_F32);
            op->op_params[OA_ATTEND_PARAM] = spec_.kernel == "oallama";
            return op;
        }
        ggml_tensor * kq = ggml_mul_mat(ctx, k, q);
        ggml_prec_set_acc(kq, GGML_PREC_F32); // another kernel on CUDA
        v = ggml_reshape_3d(ctx, v, spec_.depth, spec_.head_dim_v, spec_.n_head_kv);
        return ggml_mul_mat(ctx, v, ggml_soft_max_ext(ctx, kq, mask, scale, 0.0f));
    }

    void fill_cold(const std::vector<oa_operands> & copies, ggml_backend_buffer_t /* buffer */) const override {
        fill_copies(copies);
    }

    void fill_inputs(const oa_operands & inputs, int /* n_copies */) const override {
        oa_fill(inputs[0]);
        fill_mask(inputs[1]);
    }

  private:
    oa_attention_spec spec_;
    ggml_type         type_k_, type_v_;
};

class small_case : public oa_bench_case {
  public:
    explicit small_case(const oa_small_spec & spec) : spec_(spec) {}

    int64_t n_tokens() const override { return spec_.n_tokens; }

    bool chained() const override { return true; }

    oa_operands new_inputs(ggml_context * ctx, int /* n_copies */) const override {
        return { ggml_new_tensor_2d(ctx, GGML_TYPE_F32, spec_.n_embd, spec_.n_tokens) };
    }

    ggml_tensor * append(const oa_repeat & r) const override {
        return r.before && r.index % 2 ? ggml_add(r.context, r.before, r.inputs[0]) :
                                         ggml_rms_norm(r.context, r.before ? r.before : r.inputs[0], 1e-5f);
    }

    void fill_inputs(const oa_operands & inputs, int /* n_copies */) const override { oa_fill(inputs[0]); }

  private:
    oa_small_spec spec_;
};

} // namespace

ggml_type oa_parse_type(const std::string & name) {
    for (int i = 0; i < GGML_TYPE_COUNT; ++i) {
        const char * known = ggml_type_name(ggml_type(i));
        if (known && name == known && ggml_type_size(ggml_type(i)) > 0) {
            return ggml_type(i);
        }
    }
    throw std::invalid_argument("unknown tensor type '" + name + "'");
}

void oa_fill(ggml_tensor * t) {
    const auto values = make_data(t);
    ggml_backend_tensor_set(t, values.data(), 0, values.size());
}

void oa_fill_weights(const std::vector<oa_operands> & copies, ggml_backend_buffer_t buffer) {
    ggml_backend_buffer_set_usage(buffer, GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
    fill_copies(copies);
}

// Not zeros: ggml looks some f16 values up in a table, and its entry for zero would always be in the cache.
void oa_bench_case::fill_cold(const std::vector<oa_operands> & copies, ggml_backend_buffer_t buffer) const {
    ggml_backend_buffer_clear(buffer, 0);
    fill_copies(copies);
}

std::unique_ptr<oa_bench_case> oa_mul_mat_case(const oa_mul_mat_spec & spec) {
    return std::make_unique<mul_mat_case>(spec);
}

std::unique_ptr<oa_bench_case> oa_attention_case(const oa_attention_spec & spec) {
    return std::make_unique<attention_case>(spec);
}

std::unique_ptr<oa_bench_case> oa_small_case(const oa_small_spec & spec) {
    return std::make_unique<small_case>(spec);
}

ggml_context_ptr oa_bench_context(size_t n_tensors) {
    return ggml_context_ptr(ggml_init(
        { n_tensors * ggml_tensor_overhead() + ggml_graph_overhead_custom(n_tensors, false), nullptr, true }));
}

oa_bench_graph oa_repeat_case(const oa_bench_case & which, const std::vector<oa_operands> & copies,
                              const oa_operands & inputs, int first, int n) {
    const size_t  n_tensors = size_t(n) * oa_bench_max_tensors + copies.size() * copies[0].size() + inputs.size();
    auto          context   = oa_bench_context(n_tensors);
    ggml_cgraph * graph     = ggml_new_graph_custom(context.get(), n_tensors, false);
    ggml_tensor * before    = nullptr;
    for (int i = first; i < first + n; ++i) {
        before = which.append({ context.get(), i, copies[i % copies.size()], inputs, before });
        ggml_build_forward_expand(graph, before);
    }
    graph->uid = ggml_graph_next_uid();
    return { std::move(context), graph, graph->uid };
}

oa_built_case oa_build_case(const oa_bench_case & which) {
    auto       operands = oa_bench_context(1024);
    const auto cold     = which.new_cold(operands.get());
    const auto inputs   = which.new_inputs(operands.get(), 1);
    auto       repeats  = oa_repeat_case(which, { cold }, inputs, 0, 2);
    return { std::move(operands), std::move(repeats) };
}
