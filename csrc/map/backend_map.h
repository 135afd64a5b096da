// The backend map: an exact table weight -> device, layer -> device, obeyed by the patched loader and scheduler.
// Source of the idea: OATO's operator placer (a table operator -> backend). Format: docs/architecture.md.
//
// The table is either set for this thread (oa_backend_map_set) or named by OALLAMA_BACKEND_MAP. With neither, every
// hook returns at once and upstream's own rules hold. The variable may name several files, separated by ':', which the
// process's loads take in turns: llama-server loads a model and then its draft.
#pragma once

#include "backend_table.h"
#include "llama.h"
#include "segments.h"

#include <string>
#include <utility>
#include <vector>

// As llama.cpp's buft_list_t: where a weight may lie, the preferred first.
using oa_buft_list = std::vector<std::pair<ggml_backend_dev_t, ggml_backend_buffer_type_t>>;

// What the table says of a weight, with the devices that it names.
struct oa_weight_place {
    std::string        name;                  // in the table
    ggml_backend_dev_t home        = nullptr; // nullptr: there is no map
    oa_weight_mode     mode        = oa_weight_mode::resident;
    int                stream_from = 0;                   // tokens from which it is streamed; 0: never
    oa_realisation     realisation = oa_realisation::any; // on the CPU
    oa_segment         segment;                           // what part of it also lives on an accelerator
    oa_table_options   options;                           // of the model
};

// Parses and keeps `table` for the model loads of this thread. Throws std::invalid_argument naming the bad line.
LLAMA_API void oa_backend_map_set(const std::string & table);
LLAMA_API void oa_backend_map_clear();

// Why the last load on this thread was refused by the map; empty if it was not.
LLAMA_API std::string oa_backend_map_error();

// Hooks, in the order in which a load meets them. They throw std::runtime_error, which fails the load with its text.

void oa_backend_map_begin();

// Device of the KV cache and attention of layer il (il == n_layer: the output layer); nullptr without a map.
ggml_backend_dev_t oa_backend_map_layer(int il, int n_layer);

// `tied` marks the token embedding read a second time, as the output matrix, which is not divided.
// `copy_of` >= 0: each layer reads a copy of its own (rope factors), which follows that layer instead of the table; on
// the other device it would make the scheduler split the graph at every layer.
oa_weight_place oa_backend_map_weight(const std::string & name, bool tied, int copy_of);

// Where a weight, or a part of it, may lie on `dev` (nullptr: the host): the device's own memory, or those of the CPU's
// buffer types `cpu` that are the weight's realisation.
oa_buft_list oa_backend_map_bufts(const oa_weight_place & place, ggml_backend_dev_t dev, const oa_buft_list & cpu);

// The buffer type of a weight of which `chosen` (nullptr: none) supports its operator: that one, or plain memory on the
// host, where a divided weight and one that has no room to be repacked (`mapped`: it stays in the mapped file) lie.
ggml_backend_buffer_type_t oa_backend_map_buft(const oa_weight_place & place, ggml_backend_buffer_type_t chosen,
                                               const ggml_tensor * weight, bool mapped);

// Buffer types `cpu` that the twin (twins.h) of a weight on the host may lie in, the preferred first, as of a repacked
// weight; empty: it is to have none, or has one.
oa_buft_list oa_backend_map_twin_bufts(const oa_weight_place & place, const ggml_tensor * weight,
                                       const oa_buft_list & cpu);

// Whether the twin is made, in memory of type `chosen` (nullptr: the CPU has no faster layout for the weight); without
// room for it (`mapped`: the weight stays in the mapped file) it is not.
bool oa_backend_map_twin(ggml_backend_buffer_type_t chosen, const ggml_tensor * weight, bool mapped);

// Whether a part of a divided weight becomes a tensor of its own in memory of type `chosen`: on `dev` always, on the
// host (nullptr) if that is a faster layout than the mapped file's; else it is read within the whole weight.
bool oa_backend_map_part(ggml_backend_buffer_type_t chosen, const ggml_tensor * weight, const ggml_tensor * part,
                         ggml_backend_dev_t dev, bool mapped);

// Fails the load when a device cannot hold what the table puts there.
void oa_backend_map_require(bool ok, const std::string & what, ggml_backend_dev_t dev);

// Fails the load when the table names a tensor or layer the model does not have.
void oa_backend_map_done();
