// Thresholds between kernels, measured on this machine by `oallama tune`, instead of constants from other cards.
//
// MMVQ (a matrix times a few quantised columns) gives way to MMQ above a number of columns that upstream tuned on a few
// cards; every other one takes 8. A limit that is set here holds for one device and type; without one upstream decides.
#pragma once

#include "ggml.h"

#include <string>

constexpr int oa_most_mmvq_columns = 8; // MMVQ_MAX_BATCH_SIZE

// Most columns for MMVQ on CUDA device `device`, 0 for upstream's own rule. Asked for every matrix multiplication.
GGML_API int oa_tuned_mmvq_limit(ggml_type type, int device);

// limit: 1 to 8, 0 for upstream's rule. Throws std::invalid_argument naming what was expected.
GGML_API void oa_tuned_set_mmvq_limit(const std::string & device, const std::string & type, int limit);

// As above from text, "CUDA0:q4_K=5,q6_K=7;CUDA1:q4_0=4"; all of it or nothing. OALLAMA_MMVQ_LIMITS is read so at first
// use.
GGML_API void oa_tuned_set_mmvq_limits(const std::string & text);
