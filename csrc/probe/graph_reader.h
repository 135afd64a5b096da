// Operator parser (OATO): the operators of the real forward graph, taken from llama.cpp itself.
#pragma once

#include "llama.h"

#include <cstdint>
#include <string>
#include <vector>

struct oa_tensor_info {
    std::string          name;
    std::string          type; // "q4_K"
    std::vector<int64_t> ne;   // as in ggml: ne[0] is the row width
    std::vector<size_t>  nb;   // strides in bytes
    size_t               nbytes;
    bool                 lazy = false; // a table whose rows are read from the file when they are wanted
};

struct oa_graph_source {
    int            node = -1; // index of the producing node, or -1: a leaf
    oa_tensor_info leaf;      // only if node == -1
    bool           is_weight = false;
};

struct oa_graph_node {
    oa_tensor_info               out;
    std::string                  op;        // "MUL_MAT"
    std::vector<int32_t>         op_params; // ggml's, as whole numbers
    int                          layer   = -1;
    int                          view_of = -1;  // the source whose memory the result is written to; -1: has its own
    double                       flops   = 0.0; // of MUL_MAT, MUL_MAT_ID and FLASH_ATTN_EXT; else 0
    std::vector<oa_graph_source> sources;
};

// The nodes of any graph, in execution order.
std::vector<oa_graph_node> oa_read_nodes(ggml_cgraph * graph);

struct oa_graph {
    uint32_t                   n_tokens;
    std::vector<oa_graph_node> nodes; // in execution order
};

struct oa_model_graphs {
    std::string                 arch;
    std::string                 description; // "llama 8B Q4_K - Medium"
    int                         n_layer;     // whose graph is a model's own
    int                         n_heads;     // layers behind them for multi-token prediction (MTP)
    int                         n_ctx_train;
    uint64_t                    n_params;
    uint64_t                    nbytes;
    std::vector<oa_tensor_info> tensors; // what a load creates, a tied output as a second token_embd.weight
    std::vector<oa_graph>       graphs;
};

// Reads the graph of one micro-batch for each of `n_tokens` (one sequence, one output row); heads_guess: as it is while
// MTP heads guess. Throws std::runtime_error if the file cannot be loaded.
oa_model_graphs oa_read_graphs(const std::string & path, const llama_model_params & model_params,
                               const llama_context_params & context_params, const std::vector<uint32_t> & n_tokens,
                               bool heads_guess = false);
