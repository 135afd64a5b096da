#include "op_timer.h"

#include "bindings.h"

namespace {

py::list take() {
    py::list result;
    for (const auto & r : oa_op_timer_take()) {
        result.append(py::make_tuple(r.device, r.node, r.op, r.weight, r.seconds, r.nbytes));
    }
    return result;
}

} // namespace

void register_op_timer(py::module_ & m) {
    m.def("op_timer_enable", &oa_op_timer_set_enabled, py::arg("enabled"),
          "Time every node of the graphs that run from now on (CPU and CUDA backends of this process).");
    m.def("op_timer_take", &take,
          "The records so far as (device, node, op, first operand, seconds, bytes that it must read and "
          "write at least), in order; empties the list.");
}
