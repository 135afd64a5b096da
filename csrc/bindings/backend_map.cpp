#include "backend_map.h"

#include "bindings.h"
#include "host_weights.h"

void register_backend_map(py::module_ & m) {
    m.def("set_backend_map", &oa_backend_map_set, py::arg("table"),
          "Set the table (docs/architecture.md) for model loads of this thread. Raises ValueError naming a bad line.");
    m.def("clear_backend_map", &oa_backend_map_clear, "Forget the table of this thread.");
    m.def("backend_map_error", &oa_backend_map_error,
          "Why the last load of this thread was refused by the table; empty if it was not.");
    m.def("backend_map_left_mapped", &oa_host_weights_left_mapped,
          "Bytes of host weights that the last load of this thread left in the mapped file because memory is short.");
}
