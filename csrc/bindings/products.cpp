#include "own_products.h"

#include "bench_cases.h"
#include "bindings.h"
#include "ggml-backend.h"
#include "ggml-cpp.h"
#include "ggml-cpu.h"

#include <pybind11/numpy.h>

#include <stdexcept>

namespace {

using Values = py::array_t<float, py::array::c_style | py::array::forcecast>;
using Bytes  = py::array_t<uint8_t, py::array::c_style>;

py::dict multiply(const Bytes & weight, const std::string & type_name, const Values & columns, int n_threads,
                  bool marked) {
    const ggml_type type = oa_parse_type(type_name);
    if (columns.ndim() != 3 || columns.size() == 0 || columns.shape(2) % ggml_blck_size(type)) {
        throw std::invalid_argument("columns are no array [sequences, columns, k] with whole blocks of the weight");
    }
    const int64_t k = columns.shape(2), nbytes = weight.nbytes(), of_row = int64_t(ggml_row_size(type, k));
    if (nbytes == 0 || nbytes % of_row) {
        throw std::invalid_argument("the weight has " + std::to_string(nbytes) + " bytes; expected a multiple of " +
                                    std::to_string(of_row));
    }
    ggml_context_ptr ctx(ggml_init({ 8 * ggml_tensor_overhead() + ggml_graph_overhead(), nullptr, true }));
    ggml_tensor *    rows   = ggml_new_tensor_2d(ctx.get(), type, k, nbytes / of_row);
    ggml_tensor *    values = ggml_new_tensor_3d(ctx.get(), GGML_TYPE_F32, k, columns.shape(1), columns.shape(0));
    ggml_tensor *    op     = ggml_mul_mat(ctx.get(), rows, values);
    op->op_params[OA_PRODUCTS_PARAM] = marked;
    ggml_cgraph * graph              = ggml_new_graph(ctx.get());
    ggml_build_forward_expand(graph, op);

    ggml_backend_ptr        backend(ggml_backend_cpu_init());
    ggml_backend_buffer_ptr memory(ggml_backend_alloc_ctx_tensors(ctx.get(), backend.get()));
    ggml_backend_cpu_set_n_threads(backend.get(), n_threads);
    ggml_backend_tensor_set(rows, weight.data(), 0, size_t(nbytes));
    ggml_backend_tensor_set(values, columns.data(), 0, ggml_nbytes(values));
    py::array_t<float> out({ columns.shape(0), columns.shape(1), nbytes / of_row });
    py::dict           made;
    made["refusal"] = oa_products_refusal(op) ? py::cast(std::string(oa_products_refusal(op))) : py::none();
    made["kernel"]  = oa_products_takes(op) ? std::string(oa_products_kernel()) : std::string("ggml");
    {
        py::gil_scoped_release release;
        if (ggml_backend_graph_compute(backend.get(), graph) != GGML_STATUS_SUCCESS) {
            throw std::runtime_error("computing failed");
        }
        ggml_backend_tensor_get(op, out.mutable_data(), 0, ggml_nbytes(op));
    }
    made["out"] = out;
    return made;
}

} // namespace

void register_products(py::module_ & m) {
    m.def("multiply", &multiply, py::arg("weight"), py::arg("type"), py::arg("columns"), py::arg("n_threads") = 1,
          py::arg("marked") = true,
          "One product of a weight with columns on the CPU. weight: bytes of rows of a type of ggml's. columns: f32\n"
          "[sequences, columns, k]. marked: by our kernels where there is one. Returns out (f32 [sequences, columns,\n"
          "rows]), kernel (what computed it) and refusal (why there is no kernel, or None).");
    m.def("products_use", &oa_products_use, py::arg("instruction_set"),
          "Take one instruction set for our products (\"base\", \"avx2\", \"avx-vnni\", \"avx512\"; \"\" for the best\n"
          "of this CPU). Returns False where the CPU lacks it.");
}
