#include "bindings.h"
#include "graph_reader.h"

namespace {

py::dict to_dict(const oa_tensor_info & t) {
    py::dict d;
    d["name"]   = t.name;
    d["type"]   = t.type;
    d["ne"]     = t.ne;
    d["nb"]     = t.nb;
    d["nbytes"] = t.nbytes;
    d["lazy"]   = t.lazy;
    return d;
}

} // namespace

py::dict to_dict(const oa_graph_node & node) {
    py::dict d = to_dict(node.out);
    py::list sources;
    for (const auto & source : node.sources) {
        py::dict s;
        if (source.node >= 0) {
            s["kind"]  = "node";
            s["index"] = source.node;
        } else {
            s              = to_dict(source.leaf);
            s["kind"]      = "leaf";
            s["is_weight"] = source.is_weight;
        }
        sources.append(s);
    }
    d["op"]        = node.op;
    d["op_params"] = node.op_params;
    d["layer"]     = node.layer;
    d["view_of"]   = node.view_of;
    d["flops"]     = node.flops;
    d["src"]       = sources;
    return d;
}

namespace {

// The parameters come as addresses of llama-cpp-python's ctypes structures, so that a dry run and the real load
// cannot differ in a parameter.
py::dict read_graphs(const std::string & path, uintptr_t model_params, uintptr_t context_params,
                     const std::vector<uint32_t> & n_tokens, bool heads_guess) {
    oa_model_graphs model;
    {
        py::gil_scoped_release release;
        model = oa_read_graphs(path, *(const llama_model_params *) model_params,
                               *(const llama_context_params *) context_params, n_tokens, heads_guess);
    }
    py::list tensors;
    for (const auto & t : model.tensors) {
        tensors.append(to_dict(t));
    }
    py::dict graphs;
    for (const auto & graph : model.graphs) {
        py::list nodes;
        for (const auto & node : graph.nodes) {
            nodes.append(to_dict(node));
        }
        graphs[py::str(std::to_string(graph.n_tokens))] = nodes;
    }
    py::dict d;
    d["arch"]        = model.arch;
    d["description"] = model.description;
    d["n_layer"]     = model.n_layer;
    d["n_heads"]     = model.n_heads;
    d["n_ctx_train"] = model.n_ctx_train;
    d["n_params"]    = model.n_params;
    d["nbytes"]      = model.nbytes;
    d["tensors"]     = tensors;
    d["graphs"]      = graphs;
    return d;
}

} // namespace

void register_graphs(py::module_ & m) {
    m.def("read_graphs", &read_graphs, py::arg("path"), py::arg("model_params"), py::arg("context_params"),
          py::arg("n_tokens"), py::arg("heads_guess") = false,
          "The forward graphs of a model at several token counts, without loading a weight.");
}
