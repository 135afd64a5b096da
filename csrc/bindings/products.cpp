#include "own_products.h"

#include "bench_backend.h"
#include "bench_cases.h"
#include "bindings.h"
#include "cpu_functions.h"
#include "ggml-backend.h"
#include "ggml-cpp.h"
#include "skipped_experts.h"
#include "thin_products.h"

#include <pybind11/numpy.h>

#include <optional>
#include <stdexcept>

namespace {

using Values = py::array_t<float, py::array::c_style | py::array::forcecast>;
using Bytes  = py::array_t<uint8_t, py::array::c_style>;
using Ids    = py::array_t<int32_t, py::array::c_style>;

// A buffer with the weight in it, in the CPU's faster layout for its operator if that is wanted and there is one.
ggml_backend_buffer_ptr placed(ggml_tensor * weight, ggml_tensor * op, bool repacked) {
    ggml_backend_dev_t         cpu  = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    ggml_backend_buffer_type_t type = oa_weight_buffer_type(cpu, weight, op, repacked);
    ggml_backend_buffer_ptr made(ggml_backend_buft_alloc_buffer(type, ggml_backend_buft_get_alloc_size(type, weight)));
    ggml_backend_tensor_alloc(made.get(), weight, ggml_backend_buffer_get_base(made.get()));
    return made;
}

const char * kernel_of(const ggml_tensor * op) {
    if (!ggml_backend_buffer_is_host(op->src[0]->buffer)) {
        return "repacked";
    }
    if (OA_OF_CPU(oa_products_takes)(op)) {
        return OA_OF_CPU(oa_products_kernel)();
    }
    return OA_OF_CPU(oa_thin_takes)(op) ? "thin" : "ggml";
}

py::dict multiply(const Bytes & weight, const std::string & type_name, const Values & columns,
                  const std::optional<Ids> & ids, int64_t n_experts, int n_threads, bool marked, bool repacked,
                  bool last_nothing) {
    const ggml_type type = oa_parse_type(type_name);
    if (columns.ndim() != 3 || columns.size() == 0 || columns.shape(2) % ggml_blck_size(type)) {
        throw std::invalid_argument("columns are no array [tokens, columns, k] with whole blocks of the weight");
    }
    const int64_t k = columns.shape(2), nbytes = weight.nbytes(), of_rows = int64_t(ggml_row_size(type, k)) * n_experts;
    if (nbytes == 0 || nbytes % of_rows) {
        throw std::invalid_argument("the weight has " + std::to_string(nbytes) + " bytes; expected a multiple of " +
                                    std::to_string(of_rows));
    }
    if (ids && (ids->ndim() != 2 || ids->shape(0) != columns.shape(0) || ids->shape(1) % columns.shape(1))) {
        throw std::invalid_argument("ids are no array [tokens, a multiple of columns]");
    }
    const int64_t    n_rows = nbytes / of_rows, n_used = ids ? ids->shape(1) : columns.shape(1);
    ggml_context_ptr ctx(ggml_init({ 8 * ggml_tensor_overhead() + ggml_graph_overhead(), nullptr, true }));
    ggml_tensor *    rows   = ggml_new_tensor_3d(ctx.get(), type, k, n_rows, n_experts);
    ggml_tensor *    values = ggml_new_tensor_3d(ctx.get(), GGML_TYPE_F32, k, columns.shape(1), columns.shape(0));
    ggml_tensor *    chosen = ids ? ggml_new_tensor_2d(ctx.get(), GGML_TYPE_I32, n_used, ids->shape(0)) : nullptr;
    ggml_tensor * op = ids ? ggml_mul_mat_id(ctx.get(), rows, values, chosen) : ggml_mul_mat(ctx.get(), rows, values);
    op->op_params[OA_PRODUCTS_PARAM]     = marked;
    op->op_params[OA_LAST_NOTHING_PARAM] = last_nothing;
    ggml_cgraph * graph                  = ggml_new_graph(ctx.get());
    ggml_build_forward_expand(graph, op);

    ggml_backend_buffer_ptr weights = placed(rows, op, repacked);
    ggml_backend_ptr        backend = oa_make_backend(oa_require_device("CPU"), n_threads);
    ggml_backend_buffer_ptr memory(ggml_backend_alloc_ctx_tensors(ctx.get(), backend.get()));
    ggml_backend_tensor_set(rows, weight.data(), 0, size_t(nbytes));
    ggml_backend_tensor_set(values, columns.data(), 0, ggml_nbytes(values));
    if (ids) {
        ggml_backend_tensor_set(chosen, ids->data(), 0, ggml_nbytes(chosen));
    }
    ggml_backend_tensor_memset(op, 0xff, 0, ggml_nbytes(op)); // NaN: what is not written shows
    py::array_t<float> out({ int64_t(columns.shape(0)), n_used, n_rows });
    py::dict           made;
    const char *       refusal = OA_OF_CPU(oa_thin_refusal)(op) ? OA_OF_CPU(oa_products_refusal)(op) : nullptr;
    made["refusal"]            = refusal ? py::cast(std::string(refusal)) : py::none();
    made["kernel"]             = std::string(kernel_of(op));
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
    m.def(
        "multiply", &multiply, py::arg("weight"), py::arg("type"), py::arg("columns"), py::arg("ids") = py::none(),
        py::arg("n_experts") = 1, py::arg("n_threads") = 1, py::arg("marked") = true, py::arg("repacked") = false,
        py::arg("last_nothing") = false,
        "One product of a weight with columns on the CPU. weight: bytes of rows of a type of ggml's, of all experts.\n"
        "columns: f32 [tokens, columns, k]. ids: int32 [tokens, used], the experts of each token, which take its\n"
        "columns in turns; none: all columns of all tokens with one matrix. marked: by our kernels where there is "
        "one.\n"
        "repacked: the weight lies in the CPU's faster layout, where it has one. last_nothing: choices of the last\n"
        "expert are skipped, as those below zero are.\n"
        "Returns out (f32 [tokens, columns or used, rows]), kernel (what computed it) and refusal (why there is no\n"
        "kernel, or None).");
    m.def(
        "products_use", [](const char * set) { return OA_OF_CPU(oa_products_use)(set); }, py::arg("instruction_set"),
        "Take one instruction set for our products (\"base\", \"avx2\", \"avx-vnni\", \"avx512\"; \"\" for the best\n"
        "of this CPU). Returns False where the CPU lacks it.");
    m.def(
        "thin_has", [](const std::string & type) { return OA_OF_CPU(oa_thin_has)(oa_parse_type(type)); },
        py::arg("type"), "Whether this CPU has kernels of ours for products of such a weight with few columns.");
}
