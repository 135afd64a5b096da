// oallama._comm: csrc/comm seen from Python; oallama.cluster.ranks.comm is its front. No logic; the GIL is released
// while a collective runs.
#include "allreduce.h"
#include "comm_error.h"
#include "probe.h"
#include "sum.h"
#include "wire.h"

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

namespace py = pybind11;

namespace {

// The address of a buffer whose shape and type the front has checked.
void * at(uintptr_t address) {
    return reinterpret_cast<void *>(address);
}

py::dict links_dict(const oa_links & links) {
    py::dict d;
    d["alpha"]     = links.alpha;
    d["bandwidth"] = links.bandwidth;
    d["gap"]       = links.gap;
    d["a"]         = links.a;
    d["b"]         = links.b;
    d["alone"]     = links.alone;
    d["source"]    = links.source;
    return d;
}

oa_topology topology_of(const std::vector<std::pair<std::string, double>> & ranks) {
    std::vector<oa_rank_place> places;
    for (const auto & rank : ranks) {
        places.push_back({ rank.first, rank.second });
    }
    return oa_make_topology(places);
}

py::dict topology_dict(const oa_topology & topology) {
    py::list hosts;
    for (const oa_host & host : topology.hosts) {
        py::dict d;
        d["id"]    = host.id;
        d["ranks"] = host.ranks;
        d["lm"]    = host.lm;
        hosts.append(d);
    }
    py::dict d;
    d["hosts"] = hosts;
    d["gm"]    = topology.hosts[size_t(topology.gm)].lm;
    d["text"]  = topology.print();
    return d;
}

py::dict choose(size_t n_bytes, const std::vector<std::pair<std::string, double>> & ranks, double alpha,
                double bandwidth, double gap, double a, double b, double alone, int wire) {
    const oa_algorithm_choice choice = oa_choose(
        n_bytes, topology_of(ranks), { alpha, bandwidth, gap, a, b, alone, "" }, oa_wire_ratio(oa_wire_format(wire)));
    py::list all;
    for (const oa_algorithm_time & p : choice.all) {
        all.append(py::make_tuple(oa_algorithm_name(p.algorithm), p.chunk, p.slices, p.seconds));
    }
    py::dict d;
    d["algorithm"] = oa_algorithm_name(choice.best.algorithm);
    d["all"]       = all;
    d["text"]      = choice.print();
    return d;
}

void sum(uintptr_t to, const std::vector<uintptr_t> & from, int dtype, size_t n, bool reference) {
    std::vector<const void *> sources;
    for (const uintptr_t address : from) {
        sources.push_back(at(address));
    }
    (reference ? oa_sum_reference : oa_sum)(oa_dtype(dtype), at(to), sources.data(), int(sources.size()), n);
}

py::bytes q8_encode(uintptr_t from, size_t n) {
    std::string blocks((n + OA_Q8_VALUES - 1) / OA_Q8_VALUES * OA_Q8_BYTES, 0);
    oa_q8_encode(static_cast<const float *>(at(from)), n, blocks.data());
    return blocks;
}

void q8_decode(const std::string & blocks, uintptr_t to, size_t n) {
    oa_q8_decode(blocks.data(), n, static_cast<float *>(at(to)));
}

std::pair<double, double> fit_line(const std::vector<double> & bytes, const std::vector<double> & seconds) {
    double alpha, beta;
    oa_fit_line(bytes, seconds, alpha, beta);
    return { alpha, beta };
}

} // namespace

PYBIND11_MODULE(_comm, m) {
    m.doc() = "The all-reduce between ranks of several hosts.";

    // With the culprit's rank (-1 when it is not one rank) as second argument.
    static py::handle error = py::exception<oa_comm_error>(m, "Error", PyExc_RuntimeError).release();
    py::register_exception_translator([](std::exception_ptr p) {
        try {
            std::rethrow_exception(p);
        } catch (const oa_comm_error & e) {
            PyErr_SetObject(error.ptr(), py::make_tuple(e.what(), e.rank()).ptr());
        }
    });

    py::class_<oa_operation>(m, "Operation")
        .def_property_readonly("algorithm", [](const oa_operation & op) { return oa_algorithm_name(op.algorithm); })
        .def_property_readonly("chunk",
                               [](const oa_operation & op) { return op.chunk * oa_dtype_size(oa_dtype(op.dtype)); })
        .def_property_readonly("slices", [](const oa_operation & op) { return op.slices != 0; })
        .def("__str__", &oa_operation::print);

    using release = py::call_guard<py::gil_scoped_release>;
    py::class_<oa_allreduce>(m, "AllReduce")
        // `comm`: the address of an MPI_Comm.
        .def(py::init([](uintptr_t comm, const std::string & host, double speed, double timeout, int64_t area) {
                 return std::make_unique<oa_allreduce>(*static_cast<const MPI_Comm *>(at(comm)),
                                                       oa_allreduce_options{ host, speed, timeout, 0, area });
             }),
             release())
        // A call must cost microseconds: no attribute of the array is looked up, and what was done is one small object.
        .def("allreduce",
             [](oa_allreduce & group, py::array & array, int dtype, int algorithm, int wire, int64_t chunk) {
                 void *                       data = array.mutable_data();
                 const auto                   n    = size_t(array.size());
                 const py::gil_scoped_release no_gil;
                 return group.allreduce(data, oa_dtype(dtype), n, oa_algorithm(algorithm), oa_wire_format(wire), chunk);
             })
        .def("probe",
             [](oa_allreduce & group) {
                 {
                     const py::gil_scoped_release no_gil;
                     group.probe();
                 }
                 return links_dict(group.links());
             })
        .def("abort", &oa_allreduce::abort)
        .def("set_links",
             [](oa_allreduce & group, double alpha, double bandwidth, double gap, double a, double b, double alone,
                const std::string & source) {
                 group.set_links({ alpha, bandwidth, gap, a, b, alone, source });
             })
        .def_property_readonly("rank", &oa_allreduce::rank)
        .def_property_readonly("links", [](const oa_allreduce & group) { return links_dict(group.links()); })
        .def_property_readonly("topology", [](const oa_allreduce & group) { return topology_dict(group.topology()); });

    m.def("topology",
          [](const std::vector<std::pair<std::string, double>> & ranks) { return topology_dict(topology_of(ranks)); });
    m.def("choose", &choose);
    m.def("assumed_links", [] { return links_dict(oa_assumed_links()); });
    m.def("sum", &sum);
    m.def("q8_encode", &q8_encode);
    m.def("q8_decode", &q8_decode);
    m.def("fit_line", &fit_line);
}
