#include "bindings.h"
#include "graph_reader.h"
#include "link_bench.h"
#include "op_bench.h"
#include "waiting.h"

namespace {

py::dict to_dict(const oa_timing & t) {
    py::dict d;
    d["median_s"] = t.median_s;
    d["spread_s"] = t.spread_s;
    d["repeats"]  = t.repeats;
    d["best_s"]   = t.best_s;
    d["clean"]    = t.clean;
    return d;
}

// Runs `f` without the GIL and returns its timing as a dict.
template <typename F> py::dict timed(F && f) {
    oa_timing timing;
    {
        py::gil_scoped_release release;
        timing = f();
    }
    return to_dict(timing);
}

// As data/op_shapes.py has it. Throws std::runtime_error for a missing or wrong entry.
oa_node_spec node_spec(const py::dict & node, int64_t n_tokens) {
    oa_node_spec spec;
    spec.op        = node["op"].cast<std::string>();
    spec.op_params = node["op_params"].cast<std::vector<int32_t>>();
    spec.type      = node["type"].cast<std::string>();
    spec.ne        = node["ne"].cast<std::vector<int64_t>>();
    spec.view_of   = node["view_of"].cast<int>();
    spec.n_tokens  = n_tokens;
    for (const auto & source : node["sources"].cast<std::vector<py::dict>>()) {
        spec.sources.push_back({ source["type"].cast<std::string>(), source["ne"].cast<std::vector<int64_t>>(),
                                 source["nb"].cast<std::vector<size_t>>(), source["cold"].cast<bool>() });
    }
    return spec;
}

void register_op_bench(py::module_ & m) {
    py::class_<oa_op_bench>(m, "OpBench", "Times target operators and attention of one device.")
        .def(py::init<const std::string &, int, bool, size_t>(), py::arg("device"), py::arg("n_threads"),
             py::arg("use_extra_bufts"), py::arg("cold_bytes"))
        .def(
            "mul_mat",
            [](oa_op_bench & self, const std::string & type, int64_t k, int64_t m_rows, int64_t n_tokens,
               int64_t n_expert, int64_t n_used, double max_s, const std::string & realisation) {
                const oa_mul_mat_spec spec{ type, k, m_rows, n_expert, n_used, n_tokens, realisation };
                return timed([&] { return self.mul_mat(spec, max_s); });
            },
            py::arg("type"), py::arg("k"), py::arg("m"), py::arg("n_tokens"), py::arg("n_expert"), py::arg("n_used"),
            py::arg("max_s"), py::arg("realisation") = "")
        .def(
            "attention",
            [](oa_op_bench & self, const std::string & type_k, const std::string & type_v, int64_t head_dim_k,
               int64_t head_dim_v, int64_t n_head, int64_t n_head_kv, int64_t n_tokens, int64_t depth, bool flash,
               double max_s, const std::string & kernel) {
                const oa_attention_spec spec{ type_k,    type_v,   head_dim_k, head_dim_v, n_head,
                                              n_head_kv, n_tokens, depth,      flash,      kernel };
                return timed([&] { return self.attention(spec, max_s); });
            },
            py::arg("type_k"), py::arg("type_v"), py::arg("head_dim_k"), py::arg("head_dim_v"), py::arg("n_head"),
            py::arg("n_head_kv"), py::arg("n_tokens"), py::arg("depth"), py::arg("flash"), py::arg("max_s"),
            py::arg("kernel") = "ggml")
        .def(
            "small",
            [](oa_op_bench & self, int64_t n_embd, int64_t n_tokens, double max_s) {
                return timed([&] { return self.small({ n_embd, n_tokens }, max_s); });
            },
            py::arg("n_embd"), py::arg("n_tokens"), py::arg("max_s"))
        .def(
            "chain",
            [](oa_op_bench & self, const std::string & chain, const std::string & type, int64_t ne0, int64_t ne1,
               int64_t n_tokens, double max_s) {
                return timed([&] { return self.chain({ chain, type, ne0, ne1, n_tokens }, max_s); });
            },
            py::arg("chain"), py::arg("type"), py::arg("ne0"), py::arg("ne1"), py::arg("n_tokens"), py::arg("max_s"))
        .def(
            "node",
            [](oa_op_bench & self, const py::dict & node, int64_t n_tokens, double max_s) {
                const oa_node_spec spec = node_spec(node, n_tokens);
                return timed([&] { return self.node(spec, max_s); });
            },
            py::arg("node"), py::arg("n_tokens"), py::arg("max_s"))
        .def_property_readonly("buffer_type", &oa_op_bench::buffer_type)
        .def_property_readonly("warm", &oa_op_bench::warm,
                               "Whether memory was too short for all the copies that keep operands cold.");
}

py::dict built(const std::unique_ptr<oa_bench_case> & which) {
    const oa_built_case made = oa_build_case(*which);
    py::list            nodes;
    for (const oa_graph_node & node : oa_read_nodes(made.repeats.graph)) {
        nodes.append(to_dict(node));
    }
    py::dict d;
    d["uid"]   = made.repeats.uid;
    d["nodes"] = nodes;
    return d;
}

// What OpBench would time, two repeats of it, as read_graphs describes nodes.
void register_built(py::module_ & m) {
    m.def(
        "built_mul_mat",
        [](const std::string & type, int64_t k, int64_t m_rows, int64_t n_tokens, int64_t n_expert, int64_t n_used) {
            return built(oa_mul_mat_case({ type, k, m_rows, n_expert, n_used, n_tokens, "" }));
        },
        py::arg("type"), py::arg("k"), py::arg("m"), py::arg("n_tokens"), py::arg("n_expert"), py::arg("n_used"));
    m.def(
        "built_attention",
        [](const std::string & type_k, const std::string & type_v, int64_t head_dim_k, int64_t head_dim_v,
           int64_t n_head, int64_t n_head_kv, int64_t n_tokens, int64_t depth, bool flash) {
            return built(oa_attention_case(
                { type_k, type_v, head_dim_k, head_dim_v, n_head, n_head_kv, n_tokens, depth, flash, "ggml" }));
        },
        py::arg("type_k"), py::arg("type_v"), py::arg("head_dim_k"), py::arg("head_dim_v"), py::arg("n_head"),
        py::arg("n_head_kv"), py::arg("n_tokens"), py::arg("depth"), py::arg("flash"));
    m.def(
        "built_small",
        [](int64_t n_embd, int64_t n_tokens) {
            return built(oa_small_case({ n_embd, n_tokens }));
        },
        py::arg("n_embd"), py::arg("n_tokens"));
    m.def(
        "built_node",
        [](const py::dict & node, int64_t n_tokens) { return built(oa_node_case(node_spec(node, n_tokens))); },
        py::arg("node"), py::arg("n_tokens"));
    m.def(
        "built_chain",
        [](const std::string & chain, const std::string & type, int64_t ne0, int64_t ne1, int64_t n_tokens) {
            return built(oa_chain_case({ chain, type, ne0, ne1, n_tokens }));
        },
        py::arg("chain"), py::arg("type"), py::arg("ne0"), py::arg("ne1"), py::arg("n_tokens"));
}

py::list link_bench(const std::string & device, const std::vector<size_t> & sizes, double max_s) {
    std::vector<oa_link_timing> links;
    {
        py::gil_scoped_release release;
        links = oa_link_bench(device, sizes, max_s);
    }
    py::list result;
    for (const auto & link : links) {
        py::dict d     = to_dict(link.timing);
        d["direction"] = link.direction;
        d["memory"]    = link.memory;
        d["bytes"]     = link.nbytes;
        result.append(d);
    }
    return result;
}

} // namespace

void register_probes(py::module_ & m) {
    register_op_bench(m);
    register_built(m);
    m.def(
        "repacks",
        [](const std::string & device, const std::string & type, int64_t k, int64_t m_rows, int64_t n_expert) {
            return oa_repacks(device, { type, k, m_rows, n_expert, n_expert > 0 ? 1 : 0 });
        },
        py::arg("device"), py::arg("type"), py::arg("k"), py::arg("m"), py::arg("n_expert"),
        "Whether a buffer type of the device repacks a weight of this type and shape (n_expert 0: dense).");
    m.def("tiles", &oa_tiles, py::arg("device"), py::arg("type"),
          "Whether our kernels compute products of weights of this type on the device.");
    m.def(
        "attends",
        [](const std::string & device, const std::string & type_k, const std::string & type_v, int64_t head_dim_k,
           int64_t head_dim_v, int64_t n_head, int64_t n_head_kv, int64_t n_tokens, int64_t depth, bool flash,
           const std::string & kernel) {
            return oa_attends(
                device, { type_k, type_v, head_dim_k, head_dim_v, n_head, n_head_kv, n_tokens, depth, flash, kernel });
        },
        py::arg("device"), py::arg("type_k"), py::arg("type_v"), py::arg("head_dim_k"), py::arg("head_dim_v"),
        py::arg("n_head"), py::arg("n_head_kv"), py::arg("n_tokens"), py::arg("depth"), py::arg("flash"),
        py::arg("kernel") = "ggml",
        "Whether the device has every operator of such an attention, and kernel \"oallama\" computes it.");
    m.def("others_s", &oa_others_s, py::arg("children_are_ours") = false,
          "CPU seconds that others than this process took since the machine started.");
    m.def("link_bench", &link_bench, py::arg("device"), py::arg("sizes"), py::arg("max_s") = 1.0,
          "Transfer times between host and device for every size in bytes, both directions.");
    m.def("switch_bench", &oa_switch_bench, py::arg("device"), py::arg("n_threads"), py::arg("max_s"),
          py::call_guard<py::gil_scoped_release>(),
          "Seconds one device change in a graph costs, the copy of SWITCH_BYTES included.");
    m.def("overlap_bench", &oa_overlap_bench, py::arg("device"), py::arg("n_threads"), py::arg("max_s"),
          py::call_guard<py::gil_scoped_release>(),
          "Share (0 to 1) of the shorter of copies to a device and its computing that hides behind the longer.");
    m.def("concurrency_bench", &oa_concurrency_bench, py::arg("device"), py::arg("n_threads"), py::arg("max_s"),
          py::call_guard<py::gil_scoped_release>(),
          "Share (0 to 1) of the shorter of a device's computing and the CPU's that hides behind the longer.");
    m.attr("SWITCH_BYTES") = oa_switch_bytes;
}
