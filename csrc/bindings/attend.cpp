#include "own_attention.h"

#include "bench_backend.h"
#include "bench_cases.h"
#include "bindings.h"
#include "cpu_functions.h"
#include "ggml-backend.h"
#include "ggml-cpp.h"

#include <pybind11/numpy.h>

#include <algorithm>
#include <optional>
#include <stdexcept>

namespace {

using Values = py::array_t<float, py::array::c_style | py::array::forcecast>;
using Halves = py::array_t<uint16_t, py::array::c_style>;
using Bytes  = py::array_t<uint8_t, py::array::c_style>;

void set(ggml_tensor * tensor, const void * data, size_t nbytes, const char * what) {
    if (nbytes != ggml_nbytes(tensor)) {
        throw std::invalid_argument(std::string(what) + " has " + std::to_string(nbytes) + " bytes; expected " +
                                    std::to_string(ggml_nbytes(tensor)));
    }
    ggml_backend_tensor_set(tensor, data, 0, nbytes);
}

// A cache [width * n_head, n_kv, n_sequences] as attention reads it.
ggml_tensor * heads_of(ggml_context * ctx, ggml_tensor * cache, int64_t width, int64_t n_head) {
    ggml_tensor * rows = ggml_view_4d(ctx, cache, width, n_head, cache->ne[1], cache->ne[2],
                                      ggml_row_size(cache->type, width), cache->nb[1], cache->nb[2], 0);
    return ggml_permute(ctx, rows, 0, 2, 1, 3);
}

py::dict attend(const Values & q, const Bytes & k, const Bytes & v, const std::string & type_k,
                const std::string & type_v, int64_t n_head_kv, int64_t d_v, const std::optional<Halves> & mask,
                const std::optional<Values> & sinks, float scale, float max_bias, float softcap, int n_threads,
                bool marked, bool alone) {
    if (q.ndim() != 4) {
        throw std::invalid_argument("q has " + std::to_string(q.ndim()) + " axes; expected 4");
    }
    const int64_t n_sequences = q.shape(0), n_tokens = q.shape(1), n_head = q.shape(2), d_k = q.shape(3);
    const auto    k_type = oa_parse_type(type_k), v_type = oa_parse_type(type_v);
    const int64_t of_block = std::max(ggml_blck_size(k_type), ggml_blck_size(v_type));
    if (q.size() == 0 || n_head_kv < 1 || n_head % n_head_kv || d_v < 1 || d_k % of_block || d_v % of_block) {
        throw std::invalid_argument(
            "q is empty, its heads are no multiple of n_head_kv, or a head has parts of blocks");
    }
    const int64_t n_kv = int64_t(k.nbytes()) / int64_t(ggml_row_size(k_type, d_k * n_head_kv)) / n_sequences;

    ggml_context_ptr ctx(ggml_init({ 64 * ggml_tensor_overhead() + ggml_graph_overhead(), nullptr, true }));
    ggml_tensor *    queries  = ggml_new_tensor_4d(ctx.get(), GGML_TYPE_F32, d_k, n_head, n_tokens, n_sequences);
    ggml_tensor *    keys     = ggml_new_tensor_3d(ctx.get(), k_type, d_k * n_head_kv, n_kv, n_sequences);
    ggml_tensor *    values   = ggml_new_tensor_3d(ctx.get(), v_type, d_v * n_head_kv, n_kv, n_sequences);
    ggml_tensor *    seen     = nullptr;
    ggml_tensor *    of_sinks = nullptr;
    if (mask) {
        seen = ggml_new_tensor_4d(ctx.get(), GGML_TYPE_F16, n_kv, n_tokens, 1, mask->shape(0));
    }
    if (sinks) {
        of_sinks = ggml_new_tensor_1d(ctx.get(), GGML_TYPE_F32, n_head);
    }
    ggml_tensor * op = ggml_flash_attn_ext(ctx.get(), ggml_permute(ctx.get(), queries, 0, 2, 1, 3),
                                           heads_of(ctx.get(), keys, d_k, n_head_kv),
                                           heads_of(ctx.get(), values, d_v, n_head_kv), seen, scale, max_bias, softcap);
    if (of_sinks) {
        ggml_flash_attn_ext_add_sinks(op, of_sinks);
    }
    op->op_params[OA_ATTEND_PARAM] = !marked ? 0 : alone ? OA_ATTEND_ALONE : OA_ATTEND_TOGETHER;
    ggml_cgraph * graph            = ggml_new_graph(ctx.get());
    ggml_build_forward_expand(graph, op);

    ggml_backend_ptr        backend = oa_make_backend(oa_require_device("CPU"), n_threads);
    ggml_backend_buffer_ptr memory(ggml_backend_alloc_ctx_tensors(ctx.get(), backend.get()));
    set(queries, q.data(), size_t(q.nbytes()), "q");
    set(keys, k.data(), size_t(k.nbytes()), "k");
    set(values, v.data(), size_t(v.nbytes()), "v");
    if (mask) {
        set(seen, mask->data(), size_t(mask->nbytes()), "mask");
    }
    if (sinks) {
        set(of_sinks, sinks->data(), size_t(sinks->nbytes()), "sinks");
    }
    py::array_t<float> out({ n_sequences, n_tokens, n_head, d_v });
    py::dict           made;
    const char *       refusal = OA_OF_CPU(oa_attend_refusal)(op);
    made["refusal"]            = refusal ? py::cast(std::string(refusal)) : py::none();
    made["kernel"]             = std::string(OA_OF_CPU(oa_attend_takes)(op) ? OA_OF_CPU(oa_attend_kernel)(op) : "ggml");
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

void register_attend(py::module_ & m) {
    m.def("attend", &attend, py::arg("q"), py::arg("k"), py::arg("v"), py::arg("type_k"), py::arg("type_v"),
          py::arg("n_head_kv"), py::arg("d_v"), py::arg("mask") = py::none(), py::arg("sinks") = py::none(),
          py::arg("scale") = 1.0f, py::arg("max_bias") = 0.0f, py::arg("softcap") = 0.0f, py::arg("n_threads") = 1,
          py::arg("marked") = true, py::arg("alone") = false,
          "One attention operator on the CPU. q: f32 [sequences, tokens, heads, width]. k, v: bytes of caches\n"
          "[sequences, rows, heads of K/V * width] in ggml's types. mask: halves as uint16 [sequences or 1, tokens,\n"
          "rows]. marked: by our kernels where there is one. alone: each row alone. Returns out (f32 [sequences, "
          "tokens, heads, d_v]), kernel\n"
          "(what computed it) and refusal (why there is no kernel, or None).");
    m.def(
        "attend_alone",
        [](const std::string & type_k, const std::string & type_v, int64_t d_k, int64_t d_v) {
            return OA_OF_CPU(oa_attend_alone)(oa_parse_type(type_k), oa_parse_type(type_v), d_k, d_v);
        },
        py::arg("type_k"), py::arg("type_v"), py::arg("d_k"), py::arg("d_v"),
        "The number of our kernel for rows alone, for caches of these types and heads of these widths; 0: none.");
    m.def(
        "attend_use", [](const char * set) { return OA_OF_CPU(oa_attend_use)(set); }, py::arg("instruction_set"),
        "Take one instruction set for our attention (\"base\", \"avx2\", \"avx512\", \"amx\"; \"\" for the best of "
        "this CPU).\n"
        "Returns False where the CPU lacks it.");
}
