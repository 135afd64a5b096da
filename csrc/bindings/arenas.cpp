#include "arena_reader.h"
#include "bindings.h"
#include "offline_offsets.h"

namespace {

py::list read_arenas(const std::string & path, uintptr_t model_params, uintptr_t context_params,
                     const std::vector<std::pair<uint32_t, uint32_t>> & graphs) {
    std::vector<oa_arena_info> arenas;
    {
        py::gil_scoped_release release;
        arenas = oa_read_arenas(path, *(const llama_model_params *) model_params,
                                *(const llama_context_params *) context_params, graphs);
    }
    py::list result;
    for (const auto & a : arenas) {
        py::dict d;
        d["n_tokens"]    = a.n_tokens;
        d["n_outputs"]   = a.n_outputs;
        d["buffer_type"] = a.buffer_type;
        d["device"]      = a.device;
        d["is_host"]     = a.is_host;
        d["online"]      = a.online;
        d["offline"]     = a.offline;
        d["bound"]       = a.bound;
        d["blocks"]      = a.blocks;
        result.append(d);
    }
    return result;
}

std::vector<size_t> offline_offsets(const std::vector<std::vector<size_t>> & blocks) {
    std::vector<oa_block> given;
    for (const auto & b : blocks) {
        given.push_back({ b.at(0), b.at(1), b.at(2) });
    }
    return oa_offline_offsets(given);
}

} // namespace

void register_arenas(py::module_ & m) {
    m.def("read_arenas", &read_arenas, py::arg("path"), py::arg("model_params"), py::arg("context_params"),
          py::arg("graphs"), "Compute buffers of graphs (n_tokens, n_outputs), by the allocators' dry run.");
    m.def("offline_offsets", &offline_offsets, py::arg("blocks"),
          "Offsets of blocks (bytes, first, last) whose lifetimes are known beforehand.");
}
