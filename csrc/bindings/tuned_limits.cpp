#include "tuned_limits.h"
#include "bindings.h"

#include <stdexcept>

namespace {

ggml_type type_of(const std::string & name) {
    for (int t = 0; t < GGML_TYPE_COUNT; ++t) {
        if (const char * known = ggml_type_name(ggml_type(t)); known && name == known) {
            return ggml_type(t);
        }
    }
    throw std::invalid_argument("unknown tensor type '" + name + "'");
}

} // namespace

void register_tuned_limits(py::module_ & m) {
    m.def("set_mmvq_limit", &oa_tuned_set_mmvq_limit, py::arg("device"), py::arg("type"), py::arg("limit"),
          "Most columns a CUDA device multiplies by MMVQ, 1 to 8; 0 for upstream's own rule.");
    m.def("set_mmvq_limits", &oa_tuned_set_mmvq_limits, py::arg("text"),
          "The same for several, \"CUDA0:q4_K=5,q6_K=7;CUDA1:q4_0=4\": all of them or none.");
    m.def(
        "mmvq_limit", [](const std::string & type, int device) { return oa_tuned_mmvq_limit(type_of(type), device); },
        py::arg("type"), py::arg("device"), "What was set for CUDA device number `device`; 0 for upstream's own rule.");
    m.attr("MOST_MMVQ_COLUMNS") = oa_most_mmvq_columns;
}
