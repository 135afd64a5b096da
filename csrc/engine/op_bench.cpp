#include "op_bench.h"

#include "ggml.h"
#include "log_capture.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>
#include <stdexcept>

namespace {

constexpr size_t max_output_bytes = 64u << 20; // of all repeats of one graph together
constexpr int    max_repeats      = 4096;      // operators in one graph
constexpr int    max_cold_tokens  = 32;
constexpr double graph_s          = 0.03; // a graph this long makes launch and synchronisation negligible
constexpr double longest_graph_s  = 0.2;  // even if that leaves some copies warm
constexpr double min_measured_s   = 0.1;
constexpr int    min_runs         = 5;
constexpr auto   repacked         = "repacked";

ggml_type parse_type(const std::string & name) {
    for (int i = 0; i < GGML_TYPE_COUNT; ++i) {
        const char * known = ggml_type_name(ggml_type(i));
        if (known && name == known && ggml_type_size(ggml_type(i)) > 0) {
            return ggml_type(i);
        }
    }
    throw std::invalid_argument("unknown tensor type '" + name + "'");
}

ggml_context_ptr make_context(size_t n_tensors) {
    return ggml_context_ptr(ggml_init(
        { n_tensors * ggml_tensor_overhead() + ggml_graph_overhead_custom(n_tensors, false), nullptr, true }));
}

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

ggml_backend_buffer_ptr allocate(ggml_context * ctx, ggml_backend_buffer_type_t buft) {
    ggml_backend_buffer_ptr buffer(ggml_backend_alloc_ctx_tensors_from_buft(ctx, buft));
    if (!buffer) {
        throw std::runtime_error(std::string("not enough memory on ") + ggml_backend_buft_name(buft));
    }
    return buffer;
}

// What each token may see: all rows up to its own, the last token the last row. Fused attention skips the others.
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

ggml_tensor * new_weight(ggml_context * ctx, const oa_mul_mat_spec & spec) {
    const ggml_type type = parse_type(spec.type);
    return spec.n_expert > 0 ? ggml_new_tensor_3d(ctx, type, spec.k, spec.m, spec.n_expert) :
                               ggml_new_tensor_2d(ctx, type, spec.k, spec.m);
}

ggml_tensor * new_input(ggml_context * ctx, const oa_mul_mat_spec & spec) {
    return spec.n_expert > 0 ? ggml_new_tensor_3d(ctx, GGML_TYPE_F32, spec.k, 1, spec.n_tokens) :
                               ggml_new_tensor_2d(ctx, GGML_TYPE_F32, spec.k, spec.n_tokens);
}

ggml_tensor * new_mul_mat(ggml_context * ctx, const oa_mul_mat_spec & spec, ggml_tensor * weight, ggml_tensor * input) {
    if (spec.n_expert == 0) {
        return ggml_mul_mat(ctx, weight, input);
    }
    return ggml_mul_mat_id(ctx, weight, input, ggml_new_tensor_2d(ctx, GGML_TYPE_I32, spec.n_used, spec.n_tokens));
}

int copies_needed(size_t cold_bytes, size_t nbytes) {
    return int(std::clamp<size_t>((cold_bytes + nbytes - 1) / nbytes, 1, max_repeats));
}

// The most operators one graph may hold: their outputs take memory.
int most_repeats(size_t output_bytes) {
    return int(std::clamp<size_t>(max_output_bytes / std::max<size_t>(1, output_bytes), 1, max_repeats));
}

} // namespace

bool oa_repacks(const std::string & device, const oa_mul_mat_spec & spec) {
    ggml_backend_dev_t     dev    = oa_require_device(device);
    const ggml_context_ptr ctx    = make_context(8);
    ggml_tensor *          weight = new_weight(ctx.get(), spec);
    ggml_tensor *          op     = new_mul_mat(ctx.get(), spec, weight, new_input(ctx.get(), spec));
    return oa_weight_buffer_type(dev, weight, op, true) != ggml_backend_dev_buffer_type(dev);
}

oa_op_bench::oa_op_bench(const std::string & device, int n_threads, bool use_extra_bufts, size_t cold_bytes) :
    device_(oa_require_device(device)), backend_(oa_make_backend(device_, n_threads)),
    use_extra_bufts_(use_extra_bufts), cold_bytes_(cold_bytes) {}

// Many tokens are bound by arithmetic: whether the operand is cold hardly matters, but filling copies takes time.
size_t oa_op_bench::cold_bytes(int64_t n_tokens) const {
    return n_tokens <= max_cold_tokens ? cold_bytes_ : cold_bytes_ / 8;
}

oa_timing oa_op_bench::measure(const builder & build, int min_ops, int max_ops, double max_s) {
    const auto compute = [&](const prepared & p) {
        if (ggml_backend_graph_compute(backend_.get(), p.graph) != GGML_STATUS_SUCCESS) {
            throw std::runtime_error(std::string("computing failed on ") + ggml_backend_dev_name(device_));
        }
        ggml_backend_synchronize(backend_.get());
        oa_wait_for(ggml_graph_node(p.graph, -1));
    };
    int n_ops = 1;
    {
        const prepared one = build(1);
        // The best of a few: one run that lost its time slice must not decide the length of the graph.
        const auto   t      = oa_measure([&] { compute(one); }, 1.0, min_runs, 0.0, graph_s);
        const double best_s = std::max(t.best_s, 1e-7);
        n_ops = int(std::clamp(graph_s / best_s, std::min(double(min_ops), longest_graph_s / best_s), double(max_ops)));
        n_ops = std::max(n_ops, 1);
        if (n_ops == 1) {
            return oa_measure([&] { compute(one); }, 1.0, min_runs, min_measured_s, max_s);
        }
    }
    const prepared many = build(n_ops);
    return oa_measure([&] { compute(many); }, n_ops, min_runs, min_measured_s, max_s);
}

oa_op_bench::prepared oa_op_bench::allocate_graph(ggml_context_ptr context, ggml_cgraph * graph) {
    auto buffer = allocate(context.get(), ggml_backend_get_default_buffer_type(backend_.get()));
    ggml_backend_buffer_clear(buffer.get(), 0);
    return { std::move(context), std::move(buffer), graph };
}

void oa_op_bench::require_support(const ggml_tensor * op) const {
    if (!ggml_backend_dev_supports_op(device_, op)) {
        throw std::runtime_error(std::string(ggml_backend_dev_name(device_)) + " does not support " +
                                 ggml_op_name(op->op) + " of " + ggml_type_name(op->src[0]->type));
    }
}

oa_timing oa_op_bench::mul_mat(const oa_mul_mat_spec & spec, double max_s) {
    const oa_log_capture log;
    const ggml_type      type     = parse_type(spec.type);
    const bool           moe      = spec.n_expert > 0;
    const int64_t        n_exp    = std::max<int64_t>(1, spec.n_expert);
    const size_t         nbytes   = ggml_row_size(type, spec.k) * spec.m * n_exp;
    const int64_t        n_rows   = spec.n_tokens * std::max<int64_t>(1, spec.n_used);
    const int            n_copies = copies_needed(cold_bytes(spec.n_tokens), nbytes);
    const int            n_most   = most_repeats(size_t(spec.m) * n_rows * sizeof(float));
    const int64_t        n_visits = moe ? std::max<int64_t>(1, n_exp / n_rows) : 1; // until all of a copy was read

    const ggml_context_ptr     weights_ctx = make_context(n_copies);
    std::vector<ggml_tensor *> weights;
    for (int i = 0; i < n_copies; ++i) {
        weights.push_back(new_weight(weights_ctx.get(), spec));
    }
    const ggml_context_ptr probe_ctx = make_context(8);
    ggml_tensor *          probe     = new_mul_mat(probe_ctx.get(), spec, weights[0], new_input(probe_ctx.get(), spec));
    require_support(probe);
    const bool extra = spec.realisation.empty() ? use_extra_bufts_ : spec.realisation == repacked;
    const auto buft  = oa_weight_buffer_type(device_, weights[0], probe, extra);
    buffer_type_     = ggml_backend_buft_name(buft);
    if (spec.realisation == repacked && buft == ggml_backend_dev_buffer_type(device_)) {
        throw std::runtime_error(std::string(ggml_backend_dev_name(device_)) + " does not repack " + spec.type +
                                 " of " + std::to_string(spec.k) + "x" + std::to_string(spec.m));
    }

    const ggml_backend_buffer_ptr weights_buffer = allocate(weights_ctx.get(), buft);
    ggml_backend_buffer_set_usage(weights_buffer.get(), GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
    const auto data = make_data(weights[0]);
    for (ggml_tensor * weight : weights) {
        ggml_backend_tensor_set(weight, data.data(), 0, data.size());
    }
    std::vector<router> routers(moe ? n_copies : 0, router(n_exp));
    int                 next  = 0; // continue with the copies the graph before did not touch
    const auto          build = [&](int n_ops) {
        auto                                       ctx = make_context(8 * n_ops + 16);
        ggml_cgraph *                              graph = ggml_new_graph_custom(ctx.get(), 4 * n_ops + 8, false);
        ggml_tensor *                              input = new_input(ctx.get(), spec);
        std::vector<std::pair<int, ggml_tensor *>> choices; // of which copy
        for (int i = 0; i < n_ops; ++i) {
            const int     copy = next++ % n_copies;
            ggml_tensor * op   = new_mul_mat(ctx.get(), spec, weights[copy], input);
            choices.emplace_back(copy, op->src[2]);
            ggml_build_forward_expand(graph, op);
        }
        auto       p      = allocate_graph(std::move(ctx), graph);
        const auto values = make_data(input);
        ggml_backend_tensor_set(input, values.data(), 0, values.size());
        for (const auto & [copy, ids] : choices) {
            if (moe) {
                routers[copy].fill(ids);
            }
        }
        return p;
    };
    return measure(build, int(std::min<int64_t>(n_copies * n_visits, n_most)), n_most, max_s);
}

// llama.cpp turns flash attention off for a layer whose device lacks it for these heads or cache types.
bool oa_op_bench::supports_flash(const oa_attention_spec & spec, ggml_type type_k, ggml_type type_v) const {
    const ggml_context_ptr ctx  = make_context(8);
    ggml_context *         c    = ctx.get();
    ggml_tensor *          q    = ggml_new_tensor_3d(c, GGML_TYPE_F32, spec.head_dim_k, spec.n_tokens, spec.n_head);
    ggml_tensor *          k    = ggml_new_tensor_3d(c, type_k, spec.head_dim_k, spec.depth, spec.n_head_kv);
    ggml_tensor *          v    = ggml_new_tensor_3d(c, type_v, spec.head_dim_v, spec.depth, spec.n_head_kv);
    ggml_tensor *          mask = ggml_new_tensor_2d(c, GGML_TYPE_F16, spec.depth, spec.n_tokens);
    return ggml_backend_dev_supports_op(device_, ggml_flash_attn_ext(c, q, k, v, mask, 1.0f, 0.0f, 0.0f));
}

oa_timing oa_op_bench::attention(const oa_attention_spec & spec, double max_s) {
    const oa_log_capture log;
    const ggml_type      type_k   = parse_type(spec.type_k);
    const ggml_type      type_v   = parse_type(spec.type_v);
    const size_t         kv_bytes = size_t(spec.depth) * spec.n_head_kv *
                            (ggml_row_size(type_k, spec.head_dim_k) + ggml_row_size(type_v, spec.head_dim_v));
    const int   n_copies = copies_needed(cold_bytes(spec.n_tokens), kv_bytes);
    const int   n_most   = most_repeats(size_t(spec.head_dim_v) * spec.n_head * spec.n_tokens * sizeof(float));
    const float scale    = 1.0f / std::sqrt(float(spec.head_dim_k));

    const bool                 flash  = spec.flash && supports_flash(spec, type_k, type_v);
    const ggml_context_ptr     kv_ctx = make_context(2 * n_copies);
    std::vector<ggml_tensor *> ks, vs;
    for (int i = 0; i < n_copies; ++i) {
        // Rows of all heads together, as in llama.cpp's cache; without flash attention V is transposed.
        ks.push_back(ggml_new_tensor_2d(kv_ctx.get(), type_k, spec.head_dim_k * spec.n_head_kv, spec.depth));
        vs.push_back(flash ? ggml_new_tensor_2d(kv_ctx.get(), type_v, spec.head_dim_v * spec.n_head_kv, spec.depth) :
                             ggml_new_tensor_2d(kv_ctx.get(), type_v, spec.depth, spec.head_dim_v * spec.n_head_kv));
    }
    const ggml_backend_buffer_ptr kv = allocate(kv_ctx.get(), ggml_backend_get_default_buffer_type(backend_.get()));
    ggml_backend_buffer_clear(kv.get(), 0);
    buffer_type_ = ggml_backend_buffer_name(kv.get());

    int        next  = 0;
    const auto build = [&](int n_ops) {
        auto           ctx   = make_context(8 * n_ops + 16);
        ggml_context * c     = ctx.get();
        ggml_cgraph *  graph = ggml_new_graph_custom(c, 6 * n_ops + 8, false);
        ggml_tensor *  query = ggml_new_tensor_3d(c, GGML_TYPE_F32, spec.head_dim_k, spec.n_head, spec.n_tokens);
        ggml_tensor *  q     = ggml_permute(c, query, 0, 2, 1, 3);
        ggml_tensor *  mask  = ggml_new_tensor_2d(c, flash ? GGML_TYPE_F16 : GGML_TYPE_F32, spec.depth, spec.n_tokens);
        for (int i = 0; i < n_ops; ++i, ++next) {
            ggml_tensor * k  = heads_of(c, ks[next % n_copies], spec.head_dim_k, spec.n_head_kv);
            ggml_tensor * v  = vs[next % n_copies];
            ggml_tensor * op = nullptr;
            if (flash) {
                v  = heads_of(c, v, spec.head_dim_v, spec.n_head_kv);
                op = ggml_flash_attn_ext(c, q, k, v, mask, scale, 0.0f, 0.0f);
            } else {
                ggml_tensor * kq = ggml_mul_mat(c, k, q);
                require_support(kq);
                v  = ggml_reshape_3d(c, v, spec.depth, spec.head_dim_v, spec.n_head_kv);
                op = ggml_mul_mat(c, v, ggml_soft_max_ext(c, kq, mask, scale, 0.0f));
            }
            require_support(op);
            ggml_build_forward_expand(graph, op);
        }
        auto p = allocate_graph(std::move(ctx), graph);
        fill_mask(mask);
        return p;
    };
    return measure(build, std::min(n_copies, n_most), n_most, max_s);
}

oa_timing oa_op_bench::small(int64_t n_embd, int64_t n_tokens, double max_s) {
    const oa_log_capture log;

    const auto build = [&](int n_ops) {
        auto          ctx   = make_context(8 * n_ops + 16);
        ggml_cgraph * graph = ggml_new_graph_custom(ctx.get(), 4 * n_ops + 8, false);
        ggml_tensor * input = ggml_new_tensor_2d(ctx.get(), GGML_TYPE_F32, n_embd, n_tokens);
        ggml_tensor * cur   = input;
        for (int i = 0; i < n_ops; ++i) {
            cur = i % 2 ? ggml_add(ctx.get(), cur, input) : ggml_rms_norm(ctx.get(), cur, 1e-5f);
        }
        ggml_build_forward_expand(graph, cur);
        auto       p      = allocate_graph(std::move(ctx), graph);
        const auto values = make_data(input);
        ggml_backend_tensor_set(input, values.data(), 0, values.size());
        return p;
    };
    return measure(build, 1, max_repeats, max_s);
}
