#include "replay.h"

#include "bindings.h"
#include "ggml-backend.h"
#include "llama-arch.h"
#include "ranks.h"

void register_replay(py::module_ & m) {
    m.def("replay", &oa_replay_run, py::arg("path") = "", py::arg("n_threads") = 0, release_gil(),
          "Repeat rank 0's calls until its program ends. path: this host's copy of the model. Returns why it stopped "
          "early; empty after a regular end.");
    m.def(
        "rank_error", [] { return std::string(oa_ranks() ? oa_ranks()->error() : ""); },
        "Why the group of ranks that this process belongs to cannot go on; empty while it can.");
    m.def("rank_boundary", &oa_ranks_boundary, py::arg("share"), py::arg("ne"), py::arg("piece"),
          "Where the ranks' part of a tensor ends that has `share` of its `ne` values, in whole pieces.");
    m.def(
        "splits_architecture",
        [](const std::string & name) { return llm_arch_supports_sm_tensor(llm_arch_from_string(name)); },
        py::arg("name"), "Whether llama.cpp says that it can split tensors of this architecture's models.");
    m.def(
        "load_backend", [](const std::string & path) { return ggml_backend_load(path.c_str()) != nullptr; },
        py::arg("path"), "Load a library as a ggml backend; false if it refuses (it says why on stderr).");
}
