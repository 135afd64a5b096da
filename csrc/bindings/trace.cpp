#include "trace.h"

#include "bindings.h"

namespace {

py::list take() {
    py::list result;
    for (const auto & s : oa_trace_take()) {
        result.append(py::make_tuple(s.device, s.what, s.name, s.nbytes, s.begin, s.end));
    }
    return result;
}

} // namespace

void register_trace(py::module_ & m) {
    m.def("trace_enable", &oa_trace_set_enabled, py::arg("enabled"),
          "Note what every device computes and what is copied, by all graphs of this process that run from now on.");
    m.def("trace_take", &take,
          "The spans so far as (device, what, name, bytes, begin, end), by their end; empties the list. Seconds are "
          "those of time.monotonic().");
}
