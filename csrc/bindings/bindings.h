// One register function per bound part. Engine errors arrive in Python as ValueError (std::invalid_argument) or
// RuntimeError; python/oallama/engine turns those a user can cause into OallamaError.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

namespace py = pybind11;

using release_gil = py::call_guard<py::gil_scoped_release>;

struct oa_graph_node;
py::dict to_dict(const oa_graph_node & node);

void hide_debug_messages(); // log.cpp

void register_arenas(py::module_ & m);
void register_attend(py::module_ & m);
void register_backend_map(py::module_ & m);
void register_devices(py::module_ & m);
void register_experts(py::module_ & m);
void register_fit(py::module_ & m);
void register_replay(py::module_ & m);
void register_graphs(py::module_ & m);
void register_memory(py::module_ & m);
void register_op_timer(py::module_ & m);
void register_products(py::module_ & m);
void register_probes(py::module_ & m);
void register_streams(py::module_ & m);
void register_trace(py::module_ & m);
void register_tuned_limits(py::module_ & m);
void register_weave(py::module_ & m);
