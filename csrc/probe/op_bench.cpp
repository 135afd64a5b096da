#include "op_bench.h"

#include "cpu_functions.h"
#include "own_attention.h"
#include "own_products.h"

#include "ggml-alloc.h"
#include "ggml-impl.h"
#include "ggml.h"
#include "host_memory.h"
#include "huge_pages.h"
#include "log_capture.h"
#include "thread_team.h"

#include <algorithm>
#include <chrono>
#include <stdexcept>

namespace {

constexpr size_t max_result_bytes = 64u << 20; // of all repeats of one graph together
constexpr int    max_repeats      = 4096;      // in one graph
constexpr int    max_cold_tokens  = 32;
constexpr double graph_s          = 0.03;  // a graph this long makes launch and synchronisation negligible
constexpr double longest_graph_s  = 0.06;  // even if that does not read every copy
constexpr double short_graph_s    = 0.004; // beside other work: short enough to find its pauses
constexpr double mostly           = 0.5;
constexpr double min_measured_s   = 0.1;
constexpr int    min_runs         = 2;
constexpr int    few              = 4; // single repeats
constexpr double patience_s       = 15.0;
constexpr double usable_memory    = 0.9; // of what is free
// Backends convert operands in memory of their own: at most all scores to F16, half of their size.
constexpr double converted = 0.5;
constexpr auto   repacked  = "repacked";
constexpr auto   tiled     = "tiled";

ggml_backend_buffer_ptr allocate(ggml_context * ctx, ggml_backend_buffer_type_t buft) {
    ggml_backend_buffer_ptr buffer(ggml_backend_alloc_ctx_tensors_from_buft(ctx, buft));
    if (!buffer) {
        throw oa_no_room(std::string("not enough memory on ") + ggml_backend_buft_name(buft));
    }
    return buffer;
}

size_t usable_bytes(ggml_backend_dev_t dev) {
    size_t free = 0, total = 0;
    ggml_backend_dev_memory(dev, &free, &total);
    if (ggml_backend_dev_type(dev) == GGML_BACKEND_DEVICE_TYPE_CPU) {
        free = oa_host_memory();
    } else if (total == 0) { // not told
        free = SIZE_MAX;
    }
    return size_t(double(free) * usable_memory);
}

// Of one copy of a case's cold operands.
size_t bytes_of(const oa_bench_case & which) {
    const auto context = oa_bench_context(oa_bench_max_tensors);
    size_t     bytes   = 0;
    for (const ggml_tensor * t : which.new_cold(context.get())) {
        bytes += ggml_nbytes(t);
    }
    return bytes;
}

// Equal for cases that may read the same cold operands; "" where no other case may.
std::string name_of_cold(const oa_bench_case & which, ggml_backend_buffer_type_t cold_type) {
    if (!which.only_reads_cold()) {
        return "";
    }
    std::string name =
        std::string(ggml_backend_buft_name(cold_type)) + (which.reads_weights() ? " weights" : " caches");
    const auto context = oa_bench_context(oa_bench_max_tensors);
    for (const ggml_tensor * t : which.new_cold(context.get())) {
        name += std::string(" ") + ggml_type_name(t->type);
        for (const int64_t n : t->ne) {
            name += " " + std::to_string(n);
        }
    }
    return name;
}

bool supports(ggml_backend_dev_t dev, ggml_cgraph * graph) {
    for (int i = 0; i < ggml_graph_n_nodes(graph); ++i) {
        if (!ggml_backend_dev_supports_op(dev, ggml_graph_node(graph, i))) {
            return false;
        }
    }
    return true;
}

// Throws std::runtime_error if the device lacks an operator of the graph.
void require_operators(ggml_backend_dev_t dev, ggml_cgraph * graph) {
    for (int i = 0; i < ggml_graph_n_nodes(graph); ++i) {
        const ggml_tensor * op = ggml_graph_node(graph, i);
        if (!ggml_backend_dev_supports_op(dev, op)) {
            throw std::runtime_error(std::string(ggml_backend_dev_name(dev)) + " does not support " +
                                     ggml_op_name(op->op) + " of " + ggml_type_name(op->src[0]->type));
        }
    }
}

ggml_backend_buffer_type_t weight_type(ggml_backend_dev_t dev, const oa_mul_mat_spec & spec, bool use_extra_bufts) {
    const oa_built_case built = oa_build_case(*oa_mul_mat_case(spec));
    ggml_tensor *       op    = ggml_graph_node(built.repeats.graph, 0);
    return oa_weight_buffer_type(dev, op->src[0], op, use_extra_bufts);
}

// An RPC client keeps the last graph alone. Plans enter a device several times a step, and each part is sent anew.
bool sends_graphs(ggml_backend_dev_t dev) {
    const std::string name = ggml_backend_reg_name(ggml_backend_dev_backend_reg(dev));
    return name.rfind("RPC", 0) == 0;
}

std::string mebibytes(size_t n) {
    return std::to_string(n >> 20) + " MiB";
}

} // namespace

bool oa_repacks(const std::string & device, const oa_mul_mat_spec & spec) {
    ggml_backend_dev_t dev = oa_require_device(device);
    return weight_type(dev, spec, true) != ggml_backend_dev_buffer_type(dev);
}

bool oa_tiles(const std::string & device, const std::string & type) {
    // As for attention: a server of ours computes it on its CPU.
    ggml_backend_dev_t dev      = oa_require_device(device);
    const bool         computes = ggml_backend_dev_type(dev) == GGML_BACKEND_DEVICE_TYPE_CPU || sends_graphs(dev);
    return computes && OA_OF_CPU(oa_products_has)(oa_parse_type(type));
}

bool oa_attends(const std::string & device, const oa_attention_spec & spec) {
    const oa_built_case built = oa_build_case(*oa_attention_case(spec));
    ggml_backend_dev_t  dev   = oa_require_device(device);
    if (spec.kernel == "oallama") {
        // A server of ours on another host computes it on its CPU; whether it does, its times tell.
        const bool computes = ggml_backend_dev_type(dev) == GGML_BACKEND_DEVICE_TYPE_CPU || sends_graphs(dev);
        if (!computes || !spec.flash || OA_OF_CPU(oa_attend_refusal)(ggml_graph_node(built.repeats.graph, -1))) {
            return false;
        }
    }
    return supports(dev, built.repeats.graph);
}

oa_op_bench::oa_op_bench(const std::string & device, int n_threads, bool use_extra_bufts, size_t cold_bytes) :
    device_(oa_require_device(device)), backend_(oa_make_backend(device_, n_threads)),
    use_extra_bufts_(use_extra_bufts), cold_bytes_(cold_bytes), patience_(oa_patience_for(device_, patience_s)) {}

struct oa_op_bench::prepared {
    ggml_context_ptr         inputs_context;
    ggml_backend_buffer_ptr  inputs_buffer;
    std::vector<oa_operands> copies;
    oa_operands              inputs;
    int                      max_ops;  // that one graph may hold: their results take memory
    int                      next = 0; // continue with the copies the graph before did not touch
};

struct oa_op_bench::loaded {
    oa_bench_graph   repeats;
    ggml_gallocr_ptr memory;
    ggml_tensor *    last;
};

void oa_op_bench::make_cold(const oa_bench_case & which, ggml_backend_buffer_type_t cold_type, int n_copies) {
    cold_.context = oa_bench_context(size_t(n_copies) * oa_bench_max_tensors);
    for (int i = 0; i < n_copies; ++i) {
        cold_.copies.push_back(which.new_cold(cold_.context.get()));
    }
    if (cold_.copies[0].empty()) {
        return;
    }
    cold_.buffer = allocate(cold_.context.get(), cold_type);
    if (which.reads_weights() && cold_type == ggml_backend_cpu_buffer_type()) {
        oa_small_pages(ggml_backend_buffer_get_base(cold_.buffer.get()),
                       ggml_backend_buffer_get_size(cold_.buffer.get()));
    }
    which.fill_cold(cold_.copies, cold_.buffer.get());
}

oa_op_bench::prepared oa_op_bench::prepare(const oa_bench_case & which, ggml_backend_buffer_type_t cold_type) {
    const auto          buft  = ggml_backend_get_default_buffer_type(backend_.get());
    const oa_built_case built = oa_build_case(which);
    require_operators(device_, built.repeats.graph);
    // Many tokens are bound by arithmetic: whether the operand is cold hardly matters, but filling copies takes time.
    const size_t cold     = which.n_tokens() <= max_cold_tokens ? cold_bytes_ : cold_bytes_ / 8;
    const size_t one_copy = bytes_of(which);
    const size_t wish     = one_copy == 0 ? 1 : std::clamp<size_t>((cold + one_copy - 1) / one_copy, 1, max_repeats);
    const auto   of       = name_of_cold(which, cold_type);
    bool         is_there = !of.empty() && of == cold_.of && cold_.copies.size() >= wish;
    if (!is_there) {
        cold_ = {};
    }
    prepared     made;
    const size_t result = ggml_nbytes(ggml_graph_node(built.repeats.graph, -1));
    // What a repeat needs with all it reads, and the results of the others; copies take what is left.
    size_t                 needed = 0;
    const ggml_gallocr_ptr trial(ggml_gallocr_new(buft));
    ggml_gallocr_reserve_n_size(trial.get(), built.repeats.graph, nullptr, nullptr, &needed);
    needed        = size_t(double(needed) * (1.0 + converted));
    size_t usable = usable_bytes(device_);
    if (needed > usable && is_there) {
        cold_    = {};
        is_there = false;
        usable   = usable_bytes(device_);
    }
    if (needed > usable) {
        throw oa_no_room("it needs " + mebibytes(needed) + " of memory, " + mebibytes(usable) + " can be used");
    }
    made.max_ops = max_repeats;
    if (!which.chained()) {
        const size_t results = std::min(max_result_bytes, (usable - needed) / 2);
        made.max_ops         = int(std::clamp<size_t>(results / result, 1, max_repeats));
        needed += result * size_t(made.max_ops);
    }
    warm_ = false;
    if (!is_there) {
        const size_t room     = one_copy == 0 ? 0 : (usable - std::min(usable, needed)) / one_copy;
        const int    n_copies = int(std::min(wish, 1 + room));
        warm_                 = one_copy > 0 && size_t(n_copies) < wish;
        make_cold(which, cold_type, n_copies);
        cold_.of = of;
    }
    const int n_copies = int(std::min(wish, cold_.copies.size()));
    made.copies.assign(cold_.copies.begin(), cold_.copies.begin() + n_copies);
    made.inputs_context = oa_bench_context(size_t(n_copies) * size_t(std::max<int64_t>(which.n_visits(), 4)) + 16);
    made.inputs         = which.new_inputs(made.inputs_context.get(), n_copies);
    if (!made.inputs.empty()) {
        made.inputs_buffer = allocate(made.inputs_context.get(), buft);
        ggml_backend_buffer_clear(made.inputs_buffer.get(), 0);
        which.fill_inputs(made.inputs, n_copies);
    }
    buffer_type_ = ggml_backend_buft_name(cold_type);
    return made;
}

oa_op_bench::loaded oa_op_bench::load(const oa_bench_case & which, prepared & made, int n_ops) const {
    loaded graph{ oa_repeat_case(which, made.copies, made.inputs, made.next, n_ops),
                  ggml_gallocr_ptr(ggml_gallocr_new(ggml_backend_get_default_buffer_type(backend_.get()))), nullptr };
    if (sends_graphs(device_)) {
        graph.repeats.graph->uid = 0;
    }
    made.next += n_ops;
    if (!ggml_gallocr_alloc_graph(graph.memory.get(), graph.repeats.graph)) {
        throw oa_no_room(std::string("not enough memory on ") + ggml_backend_dev_name(device_));
    }
    graph.last = ggml_graph_node(graph.repeats.graph, -1);
    return graph;
}

void oa_op_bench::compute(const loaded & graph) const {
    const oa_all_threads all;
    if (ggml_backend_graph_compute(backend_.get(), graph.repeats.graph) != GGML_STATUS_SUCCESS) {
        throw std::runtime_error(std::string("computing failed on ") + ggml_backend_dev_name(device_));
    }
    ggml_backend_synchronize(backend_.get());
    oa_wait_for(graph.last);
}

// The best of a few, of two at least: neither one that lost its time slice must decide the length of a graph, nor the
// first one, for which a GPU may compile. Each reads another copy, as the repeats of a graph do.
double oa_op_bench::one_repeat_s(const oa_bench_case & which, prepared & made) const {
    using clock   = std::chrono::steady_clock;
    double best_s = 0.0, total_s = 0.0;
    for (int i = 0; i < few && (i < 2 || total_s < graph_s); ++i) {
        const loaded one   = load(which, made, 1);
        const auto   begin = clock::now();
        compute(one);
        const double seconds = std::chrono::duration<double>(clock::now() - begin).count();
        total_s += seconds;
        best_s = i == 0 ? seconds : std::min(best_s, seconds);
    }
    return std::max(best_s, 1e-7);
}

// Times one repeat, then in one graph as many as read every copy and as make launching negligible.
oa_timing oa_op_bench::measure(const oa_bench_case & which, ggml_backend_buffer_type_t cold_type, double max_s) {
    const oa_log_capture log;
    prepared             made          = prepare(which, cold_type);
    const int64_t        visits        = int64_t(made.copies.size()) * which.n_visits();
    const int            min_ops       = int(std::min<int64_t>(visits, made.max_ops));
    const double         one_s         = one_repeat_s(which, made);
    const double         least         = std::min(double(min_ops), longest_graph_s / one_s);
    const int            n_ops         = std::max(1, int(std::clamp(graph_s / one_s, least, double(made.max_ops))));
    const auto           measure_graph = [&](int n) {
        const loaded many = load(which, made, n);
        return oa_measure([&] { compute(many); }, n, min_runs, min_measured_s, max_s, patience_);
    };
    const oa_timing whole   = measure_graph(n_ops);
    const int       n_short = std::max(1, int(n_ops * short_graph_s / graph_s));
    if (whole.clean >= mostly || n_short == n_ops || max_s < min_measured_s || patience_.left_s <= 0.0) {
        return whole;
    }
    patience_.left_s -= max_s;
    const oa_timing pieces = measure_graph(n_short);
    return pieces.clean > whole.clean ? pieces : whole;
}

oa_timing oa_op_bench::mul_mat(const oa_mul_mat_spec & spec, double max_s) {
    const bool extra = spec.realisation.empty() ? use_extra_bufts_ : spec.realisation == repacked;
    const auto buft  = weight_type(device_, spec, extra);
    if (spec.realisation == repacked && buft == ggml_backend_dev_buffer_type(device_)) {
        throw std::runtime_error(std::string(ggml_backend_dev_name(device_)) + " does not repack " + spec.type +
                                 " of " + std::to_string(spec.k) + "x" + std::to_string(spec.m));
    }
    if (spec.realisation == tiled && !oa_tiles(ggml_backend_dev_name(device_), spec.type)) {
        throw std::runtime_error(std::string(ggml_backend_dev_name(device_)) + " has no kernels of ours for " +
                                 spec.type);
    }
    return measure(*oa_mul_mat_case(spec), buft, max_s);
}

oa_timing oa_op_bench::attention(const oa_attention_spec & spec, double max_s) {
    return measure(*oa_attention_case(spec), ggml_backend_get_default_buffer_type(backend_.get()), max_s);
}

oa_timing oa_op_bench::small(const oa_small_spec & spec, double max_s) {
    return measure(*oa_small_case(spec), ggml_backend_get_default_buffer_type(backend_.get()), max_s);
}

oa_timing oa_op_bench::chain(const oa_chain_spec & spec, double max_s) {
    return measure(*oa_chain_case(spec), ggml_backend_get_default_buffer_type(backend_.get()), max_s);
}

oa_timing oa_op_bench::node(const oa_node_spec & spec, double max_s) {
    return measure(*oa_node_case(spec), ggml_backend_get_default_buffer_type(backend_.get()), max_s);
}
