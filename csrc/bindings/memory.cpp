#include "bindings.h"
#include "buffer_ledger.h"
#include "host_memory.h"
#include "memory_dry_run.h"

namespace {

py::list to_list(const std::vector<oa_buffer_bytes> & buffers) {
    py::list result;
    for (const auto & b : buffers) {
        py::dict d;
        d["buffer_type"] = b.buffer_type;
        d["device"]      = b.device;
        d["is_host"]     = b.is_host;
        d["weights"]     = b.weights;
        d["kv"]          = b.kv;
        d["compute"]     = b.compute;
        result.append(d);
    }
    return result;
}

py::list dry_run(const std::string & path, uintptr_t model_params, uintptr_t context_params, bool heads_guess) {
    std::vector<oa_buffer_bytes> buffers;
    {
        py::gil_scoped_release release;
        buffers = oa_memory_dry_run(path, *(const llama_model_params *) model_params,
                                    *(const llama_context_params *) context_params, heads_guess);
    }
    return to_list(buffers);
}

py::dict ledger() {
    py::dict result;
    for (const auto & [name, entry] : oa_buffer_ledger_get()) {
        py::dict d;
        d["current"]          = entry.current;
        d["peak"]             = entry.peak;
        result[py::str(name)] = d;
    }
    return result;
}

} // namespace

void register_memory(py::module_ & m) {
    m.def("memory_dry_run", &dry_run, py::arg("path"), py::arg("model_params"), py::arg("context_params"),
          py::arg("heads_guess") = false,
          "Bytes per buffer type under the thread's backend map, by the allocators' dry run.");
    m.def(
        "memory_of", [](uintptr_t context) { return to_list(oa_memory_of((const llama_context *) context)); },
        py::arg("context"), "Bytes per buffer type of a live llama_context (its address).");
    m.def("ledger", &ledger, "Bytes of all live backend buffers and their peak, by buffer type.");
    m.def("host_memory", &oa_host_memory,
          "Bytes of memory that this process may still take, by the system and its control groups.");
    m.def("ledger_reset_peak", &oa_buffer_ledger_reset_peak, "Start the peaks again from what is allocated now.");
}
