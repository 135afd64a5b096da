// The parts of a weight whose experts are divided: matrices of experts, or their biases.
//
// The accelerator has its experts, and behind them one of zeros. The host reads the weight itself, in place, or has a
// copy of the others in a faster layout. A table for each side says which number an expert has there: the zeros' on the
// accelerator, -1 on the host, where the expert is the other side's.
//
// A weight with slots shares the tables of its layer, and the host has all experts, in place or as a copy.
#pragma once

#include "segments.h"

// As oa_segments_begin, oa_segments_add and oa_segments_fill, for weights divided by experts.
std::shared_ptr<void> oa_expert_parts_begin(const llama_model * model);
void oa_expert_parts_add(ggml_tensor * weight, const oa_segment & segment, const oa_segment_context & context);
void oa_expert_parts_fill();
