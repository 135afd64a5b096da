// The backend map: an exact table tensor -> device, layer -> device, obeyed by the patched loader and scheduler.
// Source of the idea: OATO's operator placer (a table operator -> backend). Format: docs/architecture.md.
//
// The table is either set for this thread (oa_backend_map_set) or named by OALLAMA_BACKEND_MAP. With neither, every
// hook returns at once and upstream's own rules hold.
#pragma once

#include "llama.h"
#include "segments.h"

#include <string>
#include <utility>
#include <vector>

// As llama.cpp's buft_list_t: where a weight may lie, the preferred first.
using oa_buft_list = std::vector<std::pair<ggml_backend_dev_t, ggml_backend_buffer_type_t>>;

// Parses and keeps `table` for the model loads of this thread. Throws std::invalid_argument naming the bad line.
LLAMA_API void oa_backend_map_set(const std::string & table);
LLAMA_API void oa_backend_map_clear();

// Why the last load on this thread was refused by the map; empty if it was not.
LLAMA_API std::string oa_backend_map_error();

// Bytes of host weights that the last load on this thread left in the mapped file because memory is short, instead of
// repacking them for the CPU's faster kernels.
LLAMA_API size_t oa_backend_map_left_mapped();

// Hooks, in the order in which a load meets them. They throw std::runtime_error, which fails the load with its text.

void oa_backend_map_begin();

// Device of the KV cache and attention of layer il (il == n_layer: the output layer); nullptr without a map.
ggml_backend_dev_t oa_backend_map_layer(int il, int n_layer);

// Home of a weight; `tied` marks the token embedding read a second time, as the output matrix. nullptr without a map.
// `copy_of` >= 0: each layer reads a copy of its own (rope factors), which follows that layer instead of the table; on
// the other device it would make the scheduler split the graph at every layer.
ggml_backend_dev_t oa_backend_map_tensor(const std::string & name, bool tied, int copy_of);

// Those of the CPU's buffer types `list` that are the realisation of the weight asked for last: plain ones, which
// everybody can read, or repacked ones; all without a word in the table.
oa_buft_list oa_backend_map_realised(const oa_buft_list & list);

// The buffer type of a weight whose home is the CPU: `buft`, or plain memory, which stays in the mapped file, once the
// repacked weights of this load would take more than the host has. Without a file mapping (`mapped`) it is `buft`.
ggml_backend_buffer_type_t oa_backend_map_host_buft(ggml_backend_buffer_type_t buft, const ggml_tensor * weight,
                                                    bool mapped);

// What part of the weight the table puts on an accelerator (docs/architecture.md). `tied`: as above.
oa_segment oa_backend_map_segment(const ggml_tensor * weight, bool tied);

// Whether a part of a divided weight becomes a tensor of its own in memory of type `buft`: on `dev` always, on the host
// (nullptr) if that is a faster layout than the mapped file's; else it is read within the whole weight.
bool oa_backend_map_part(ggml_backend_buffer_type_t buft, const ggml_tensor * weight, const ggml_tensor * part,
                         ggml_backend_dev_t dev, bool mapped);

// Stamps the mode of the table onto the loaded tensor, which lies at `offset` of the open file `fd` (-1: in none).
void oa_backend_map_mark(ggml_tensor * tensor, bool tied, int fd, size_t offset);

// Whether the model, known by any of its weights, obeys a map. Upstream pins some norms to the device of their layer's
// KV cache; under a map they run beside what they read and feed, as planned.
bool oa_backend_map_obeyed(const ggml_tensor * weight);

// Marks the KV cache of a layer (k or v may be null), which will be in memory of type `buft`, if the model obeys a map.
void oa_backend_map_mark_cache(const ggml_tensor * embedding, ggml_backend_buffer_type_t buft, ggml_tensor * k,
                               ggml_tensor * v);

// Fails the load when a device cannot hold what the table puts there.
void oa_backend_map_require(bool ok, const std::string & what, ggml_backend_dev_t dev);

// Fails the load when the table names a tensor or layer the model does not have.
void oa_backend_map_done();
