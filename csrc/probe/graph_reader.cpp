#include "graph_reader.h"

#include "ggml-backend-impl.h"
#include "ggml-impl.h"
#include "llama-ext.h"
#include "model_skeleton.h"
#include "tensor_flags.h"

#include <algorithm>
#include <cstdlib>
#include <stdexcept>
#include <unordered_map>

namespace {

oa_tensor_info describe(const ggml_tensor * t) {
    return { t->name,
             ggml_type_name(t->type),
             { t->ne, t->ne + GGML_MAX_DIMS },
             { t->nb, t->nb + GGML_MAX_DIMS },
             ggml_nbytes(t),
             (t->flags & OA_TENSOR_FLAG_LAZY) != 0 };
}

bool is_weight(const ggml_tensor * t) {
    return t->buffer && ggml_backend_buffer_get_usage(t->buffer) == GGML_BACKEND_BUFFER_USAGE_WEIGHTS;
}

// llama.cpp names nodes "<what>-<layer>", weights "blk.<layer>.<what>" and caches "cache_k_l<layer>".
int layer_of(const std::string & name) {
    if (name.rfind("blk.", 0) == 0) {
        return std::atoi(name.c_str() + 4);
    }
    if (name.rfind("cache_", 0) == 0 && name.size() > 9 && name[8] == 'l') {
        return std::atoi(name.c_str() + 9);
    }
    const size_t dash = name.rfind('-');
    if (dash == std::string::npos || dash + 1 == name.size() ||
        !std::all_of(name.begin() + dash + 1, name.end(), [](unsigned char c) { return std::isdigit(c); })) {
        return -1;
    }
    return std::atoi(name.c_str() + dash + 1);
}

// The tensor whose memory this one has.
const ggml_tensor * memory_of(const ggml_tensor * t) {
    return t->view_src ? t->view_src : t;
}

// Names ggml made up: such a node belongs where its operands do.
bool anonymous(const std::string & name) {
    return name.rfind("node_", 0) == 0 || name.find(" (") != std::string::npos;
}

double flops_of(const ggml_tensor * node) {
    const auto n = [](const ggml_tensor * t) { return double(ggml_nelements(t)); };
    switch (node->op) {
        case GGML_OP_MUL_MAT:
        case GGML_OP_MUL_MAT_ID: return 2.0 * double(node->src[0]->ne[0]) * n(node);
        case GGML_OP_FLASH_ATTN_EXT: // Q K^T over the KV length, then times V
            return 2.0 * n(node->src[0]) * double(node->src[1]->ne[1]) +
                   2.0 * double(node->src[2]->ne[0]) * double(node->src[1]->ne[1]) *
                       double(node->src[0]->ne[1] * node->src[0]->ne[2]);
        default: return 0.0;
    }
}

std::string metadata(const llama_model * model, const char * key) {
    char value[256] = "";
    llama_model_meta_val_str(model, key, value, sizeof(value));
    return value;
}

} // namespace

std::vector<oa_graph_node> oa_read_nodes(ggml_cgraph * gf) {
    std::vector<oa_graph_node>                   nodes;
    std::unordered_map<const ggml_tensor *, int> index;
    for (int i = 0; i < ggml_graph_n_nodes(gf); ++i) {
        const ggml_tensor * t = ggml_graph_node(gf, i);

        oa_graph_node node;
        node.out   = describe(t);
        node.op    = ggml_op_name(t->op);
        node.layer = layer_of(node.out.name);
        node.op_params.assign(t->op_params, t->op_params + GGML_MAX_OP_PARAMS / sizeof(int32_t));
        node.flops = flops_of(t);
        for (const ggml_tensor * src : t->src) {
            if (src == nullptr) {
                continue;
            }
            oa_graph_source source;
            const auto      it = index.find(src);
            if (it != index.end()) {
                source.node = it->second;
            } else {
                source.leaf      = describe(src);
                source.is_weight = is_weight(src);
            }
            if (t->view_src && node.view_of < 0 && memory_of(src) == t->view_src) {
                node.view_of = int(node.sources.size());
            }
            if (anonymous(node.out.name) && node.layer < 0) {
                node.layer = source.node >= 0 ? nodes[source.node].layer : layer_of(source.leaf.name);
            }
            node.sources.push_back(std::move(source));
        }
        index.emplace(t, i);
        nodes.push_back(std::move(node));
    }
    return nodes;
}

oa_model_graphs oa_read_graphs(const std::string & path, const llama_model_params & model_params,
                               const llama_context_params & context_params, const std::vector<uint32_t> & n_tokens,
                               bool heads_guess) {
    llama_context_params params = context_params;
    for (const uint32_t n : n_tokens) {
        params.n_ubatch = std::max(params.n_ubatch, n);
        params.n_batch  = std::max(params.n_batch, n);
    }
    const oa_model_skeleton skeleton(path, model_params, params);
    const llama_model *     model = skeleton.model();

    oa_model_graphs result;
    result.arch        = metadata(model, "general.architecture");
    result.n_layer     = llama_model_n_layer(model);
    result.n_heads     = llama_model_n_layer_nextn(model);
    result.n_ctx_train = llama_model_n_ctx_train(model);
    result.n_params    = llama_model_n_params(model);
    result.nbytes      = llama_model_size(model);
    char description[128];
    llama_model_desc(model, description, sizeof(description));
    result.description = description;
    for (const auto & [name, tensor] : llama_internal_get_tensor_map(model)) {
        result.tensors.push_back(describe(tensor));
    }
    if (heads_guess) {
        llama_set_embeddings_nextn(skeleton.context(), true, params.ctx_type == LLAMA_CONTEXT_TYPE_MTP);
    }
    for (const uint32_t n : n_tokens) {
        ggml_cgraph * gf = llama_graph_reserve(skeleton.context(), n, 1, 1);
        if (gf == nullptr) {
            throw std::runtime_error("cannot build the graph of " + path + " for " + std::to_string(n) + " tokens in " +
                                     std::to_string(params.n_ctx) + " of context\n" + skeleton.errors());
        }
        result.graphs.push_back({ n, oa_read_nodes(gf) });
    }
    return result;
}
