// oallama._core: registers the bound parts, one file each.
#include "bindings.h"

PYBIND11_MODULE(_core, m) {
    m.doc() = "The engine of oallama: the patched llama.cpp seen from Python.";

    m.attr("ENGINE_ID") = OALLAMA_ENGINE_ID; // of the sources: the same on all hosts of a cluster

    hide_debug_messages();

    register_arenas(m);
    register_attend(m);
    register_backend_map(m);
    register_devices(m);
    register_experts(m);
    register_fit(m);
    register_replay(m);
    register_graphs(m);
    register_memory(m);
    register_op_timer(m);
    register_products(m);
    register_probes(m);
    register_streams(m);
    register_trace(m);
    register_tuned_limits(m);
    register_weave(m);
}
