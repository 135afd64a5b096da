// Divided weights: a part of a weight whose home is the host also lives on an accelerator, and both sides compute their
// part of the operators that read it at the same time. Source of the idea: tensor virtualisation (ML Drift;
// docs/sources.md, 3). Hooks: patch 0013; the table: docs/architecture.md, "Backend map".
//
// By values: the first rows or columns. A feed-forward block is divided along its inner width: rows of up and gate,
// columns of down; whatever lies between them and works on single values is done on both sides, and the two results are
// added. A weight that stands alone is divided by rows, and the two results are concatenated.
// By experts: some experts of a mixture's layer, the same ones for up, gate and down. Each side computes the choices of
// its experts, and the two results are added. Or there are slots for some, which change (expert_slots.h).
// Batches whose host weights are uploaded or streamed read the whole weight, which the host keeps.
#pragma once

#include "division.h"
#include "llama.h"
#include "table_memory.h"

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

// One weight's line of the table; nullptr device: it is whole.
struct oa_segment {
    ggml_backend_dev_t device = nullptr;
    oa_division        part;
    int                uploads       = 1; // experts that a layer with slots may upload in a step
    int                n_slot_layers = 0; // that have slots on the device
};

// Where a part of a weight is created: a context whose tensors will be allocated on the device, or in the host's
// fastest layout for this operator (device is nullptr; may be nullptr: the part is read within the whole weight).
// GGML_OP_GET_ROWS: a table of numbers, in plain memory on either side.
using oa_segment_context = std::function<ggml_context *(ggml_tensor part, ggml_backend_dev_t device, ggml_op op)>;

// While a model is loaded: forget the last load; make the parts of `weight`; fill them, once the weights are loaded.
// oa_segments_add throws std::runtime_error when the weight cannot be divided so. What oa_segments_begin returns lives
// as long as the model, and ends before its weights.
std::shared_ptr<void> oa_segments_begin(const llama_model * model);
void oa_segments_add(ggml_tensor * weight, const oa_segment & segment, const oa_segment_context & context);
void oa_segments_fill();

// Tensors that a graph of a model with these weights may have beyond upstream's, at `n_used` experts for a token.
uint32_t oa_segments_more_nodes(const std::vector<std::pair<std::string, ggml_tensor *>> & weights, uint32_t n_used);

// Replaces operators that read divided weights, once the graph is built.
void oa_segments_divide(ggml_context * ctx, ggml_cgraph * graph);
