// A node of a model's graph, rebuilt from what the graph reader says of it: operators that are neither a product with a
// weight nor attention, and yet take time (scans, convolutions, sorting, wide activations).

#include "bench_cases.h"
#include "ggml.h"

#include <algorithm>
#include <stdexcept>

namespace {

ggml_op parse_op(const std::string & name) {
    for (int i = 0; i < GGML_OP_COUNT; ++i) {
        if (name == ggml_op_name(ggml_op(i))) {
            return ggml_op(i);
        }
    }
    throw std::invalid_argument("unknown operator '" + name + "'");
}

// Rows that a lookup reads, spread over the table.
void fill_rows(ggml_tensor * ids, int64_t n_rows) {
    const int64_t        n = ggml_nelements(ids);
    std::vector<int32_t> rows(n);
    for (int64_t i = 0; i < n; ++i) {
        rows[i] = int32_t(i * n_rows / n);
    }
    ggml_backend_tensor_set(ids, rows.data(), 0, ggml_nbytes(ids));
}

class node_case : public oa_bench_case {
  public:
    explicit node_case(const oa_node_spec & spec) : spec_(spec), op_(parse_op(spec.op)) {
        // Indices, positions and the like are inputs: zero is valid in all of them.
        const bool fits = spec.sources.size() <= GGML_MAX_SRC && spec.ne.size() == GGML_MAX_DIMS &&
                          spec.op_params.size() * sizeof(int32_t) <= GGML_MAX_OP_PARAMS &&
                          spec.view_of < int(spec.sources.size()) &&
                          std::all_of(spec.sources.begin(), spec.sources.end(), [](const oa_source_spec & s) {
                              return s.ne.size() == GGML_MAX_DIMS && s.nb.size() == GGML_MAX_DIMS;
                          });
        if (!fits) {
            throw std::invalid_argument("a node of " + spec.op + " with sources that ggml has no room for");
        }
    }

    int64_t n_tokens() const override { return spec_.n_tokens; }

    oa_operands new_cold(ggml_context * ctx) const override { return make(ctx, true); }

    oa_operands new_inputs(ggml_context * ctx, int /* n_copies */) const override { return make(ctx, false); }

    ggml_tensor * append(const oa_repeat & r) const override {
        ggml_tensor * t = ggml_new_tensor(r.context, oa_parse_type(spec_.type), GGML_MAX_DIMS, spec_.ne.data());
        t->op           = op_;
        std::copy(spec_.op_params.begin(), spec_.op_params.end(), t->op_params);
        size_t cold = 0, warm = 0;
        for (size_t i = 0; i < spec_.sources.size(); ++i) {
            t->src[i] = spec_.sources[i].cold ? r.cold[cold++] : r.inputs[warm++];
        }
        if (spec_.view_of >= 0) {
            t->view_src = t->src[spec_.view_of];
            std::copy_n(t->view_src->nb, GGML_MAX_DIMS, t->nb);
        }
        return t;
    }

    void fill_inputs(const oa_operands & inputs, int /* n_copies */) const override {
        for (ggml_tensor * t : inputs) {
            if (t->type != GGML_TYPE_I32 && t->type != GGML_TYPE_I64) {
                oa_fill(t);
            } else if (op_ == GGML_OP_GET_ROWS && t->type == GGML_TYPE_I32) {
                fill_rows(t, spec_.sources[0].ne[1]);
            }
        }
    }

  private:
    oa_operands make(ggml_context * ctx, bool cold) const {
        oa_operands made;
        for (const oa_source_spec & source : spec_.sources) {
            if (source.cold == cold) {
                made.push_back(ggml_new_tensor(ctx, oa_parse_type(source.type), GGML_MAX_DIMS, source.ne.data()));
                std::copy(source.nb.begin(), source.nb.end(), made.back()->nb);
            }
        }
        return made;
    }

    oa_node_spec spec_;
    ggml_op      op_;
};

} // namespace

std::unique_ptr<oa_bench_case> oa_node_case(const oa_node_spec & spec) {
    return std::make_unique<node_case>(spec);
}
