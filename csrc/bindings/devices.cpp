#include "bindings.h"
#include "ggml-backend.h"
#include "ggml-cpu.h"
#include "ggml-rpc.h"
#include "ggml.h"
#include "rpc_hooks.h"

#include <stdexcept>

namespace {

const char * type_name(enum ggml_backend_dev_type type) {
    switch (type) {
        case GGML_BACKEND_DEVICE_TYPE_CPU: return "cpu";
        case GGML_BACKEND_DEVICE_TYPE_GPU: return "gpu";
        case GGML_BACKEND_DEVICE_TYPE_IGPU: return "igpu";
        case GGML_BACKEND_DEVICE_TYPE_ACCEL: return "accel";
        default: return "other";
    }
}

// True if the device takes a large matmul whose weight lies in host memory (upstream's op_offload).
bool offloads(ggml_backend_dev_t dev) {
    ggml_context * ctx    = ggml_init({ 8 * ggml_tensor_overhead(), nullptr, true });
    ggml_tensor *  weight = ggml_new_tensor_2d(ctx, GGML_TYPE_F16, 256, 256);
    ggml_tensor *  input  = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, 256, 512);
    const bool     yes    = ggml_backend_dev_offload_op(dev, ggml_mul_mat(ctx, weight, input));
    ggml_free(ctx);
    return yes;
}

py::dict describe(ggml_backend_dev_t dev) {
    ggml_backend_dev_props props;
    ggml_backend_dev_get_props(dev, &props);

    py::dict d;
    d["name"]                 = props.name;
    d["description"]          = props.description;
    d["type"]                 = type_name(props.type);
    d["backend"]              = ggml_backend_reg_name(ggml_backend_dev_backend_reg(dev));
    d["memory_free"]          = props.memory_free;
    d["memory_total"]         = props.memory_total;
    d["async"]                = props.caps.async;
    d["host_buffer"]          = props.caps.host_buffer;
    d["buffer_from_host_ptr"] = props.caps.buffer_from_host_ptr;
    d["events"]               = props.caps.events;
    d["op_offload"]           = offloads(dev);
    return d;
}

py::list devices() {
    py::list result;
    for (size_t i = 0; i < ggml_backend_dev_count(); ++i) {
        result.append(describe(ggml_backend_dev_get(i)));
    }
    return result;
}

py::object device(const std::string & name) {
    ggml_backend_dev_t dev = ggml_backend_dev_by_name(name.c_str());
    return dev ? py::object(describe(dev)) : py::none();
}

std::vector<std::string> device_names() {
    std::vector<std::string> names;
    for (size_t i = 0; i < ggml_backend_dev_count(); ++i) {
        names.push_back(ggml_backend_dev_name(ggml_backend_dev_get(i)));
    }
    return names;
}

void rpc_hello(const std::string & endpoint, double timeout_s) {
    ggml_backend_reg_t rpc   = ggml_backend_reg_by_name("RPC");
    auto *             hello = rpc ? (oa_rpc_hello_t) ggml_backend_reg_get_proc_address(rpc, "oa_rpc_hello") : nullptr;
    if (hello == nullptr) {
        throw std::invalid_argument("this build has no RPC backend (OALLAMA_RPC=OFF)");
    }
    hello(endpoint.c_str(), timeout_s);
}

std::vector<std::string> add_rpc_server(const std::string & endpoint) {
    ggml_backend_reg_t rpc = ggml_backend_reg_by_name("RPC");
    if (rpc == nullptr) {
        throw std::invalid_argument("this build has no RPC backend (OALLAMA_RPC=OFF)");
    }
    using add_server_t     = ggml_backend_reg_t (*)(const char *);
    auto * add_server      = (add_server_t) ggml_backend_reg_get_proc_address(rpc, "ggml_backend_rpc_add_server");
    ggml_backend_reg_t reg = add_server ? add_server(endpoint.c_str()) : nullptr;
    if (reg == nullptr) {
        throw std::invalid_argument("no RPC server answers at " + endpoint);
    }
    ggml_backend_register(reg);
    std::vector<std::string> names;
    for (size_t i = 0; i < ggml_backend_reg_dev_count(reg); ++i) {
        names.push_back(ggml_backend_dev_name(ggml_backend_reg_dev_get(reg, i)));
    }
    return names;
}

} // namespace

void register_devices(py::module_ & m) {
    m.attr("RPC_MAJOR_VERSION") = RPC_PROTO_MAJOR_VERSION;
    m.def("devices", &devices, "Every device ggml sees, as dicts; memory in bytes.");
    m.def(
        "device", &device, py::arg("name"),
        "The device of that name, or None. No other one is asked: ggml aborts the process when it asks an RPC server\n"
        "that is gone.");
    m.def("device_names", &device_names, "Names of all devices; none is asked.");
    m.def("rpc_hello", &rpc_hello, py::arg("endpoint"), py::arg("timeout_s"), release_gil(),
          "Connect to an RPC server, show the token (OALLAMA_RPC_TOKEN_FILE), say hello and ask for its devices.\n"
          "Raises RuntimeError with what is wrong; ValueError if the build has no RPC backend.");
    m.def("add_rpc_server", &add_rpc_server, py::arg("endpoint"), release_gil(),
          "Register the devices of an RPC server ('host:port') and return their names. The server must be up: ggml\n"
          "aborts the process when a connection breaks. Raises ValueError if the build has no RPC backend.");
    m.def(
        "device_address", [](const std::string & name) { return (uintptr_t) ggml_backend_dev_by_name(name.c_str()); },
        py::arg("name"),
        "Address of a ggml_backend_dev_t for llama_model_params.devices; 0 if there is no such device.");
}
