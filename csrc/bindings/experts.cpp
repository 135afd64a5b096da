#include "bindings.h"
#include "chosen_experts.h"
#include "tensor_places.h"

#include <algorithm>
#include <pybind11/numpy.h>

namespace {

py::list take(oa_expert_watch & watch) {
    py::list result;
    for (const auto & chosen : watch.take()) {
        py::array_t<int32_t> ids({ chosen.n_tokens, chosen.n_used });
        std::copy(chosen.ids.begin(), chosen.ids.end(), ids.mutable_data());
        result.append(py::make_tuple(chosen.layer, ids));
    }
    return result;
}

py::dict places(const std::string & path) {
    oa_file_outline outline;
    {
        py::gil_scoped_release release;
        outline = oa_tensor_places(path);
    }
    py::list tensors;
    for (const auto & t : outline.tensors) {
        tensors.append(py::make_tuple(t.name, t.ne, t.offset, t.nbytes));
    }
    py::dict d;
    d["arch"]    = outline.arch;
    d["n_parts"] = outline.n_parts;
    d["tensors"] = tensors;
    return d;
}

} // namespace

void register_experts(py::module_ & m) {
    py::class_<oa_expert_watch>(m, "ExpertWatch",
                                "Notes the experts that routers choose. It must outlive the contexts it watches.")
        .def(py::init<>())
        .def_property_readonly(
            "addresses",
            [](oa_expert_watch & watch) {
                return py::make_tuple(uintptr_t(&oa_expert_watch::callback), uintptr_t(&watch));
            },
            "For llama_context_params: cb_eval and cb_eval_user_data.")
        .def("take", &take, "What was chosen so far as (layer, ids [tokens, used]), in order; empties the list.");
    m.def("tensor_places", &places, py::arg("path"),
          "Of a GGUF file {arch, n_parts, tensors}: each tensor as (name, ne, offset in the file, bytes).");
}
