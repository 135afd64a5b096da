// What another rank's device looks like from here: tensors have sizes but no storage, writes and computations do
// nothing, reads leave the destination as it is.
#pragma once

#include "ggml-backend-impl.h"

// The buffer type of `dev`; sizes and alignments are those of `real`, so that plans of memory agree on all ranks.
ggml_backend_buffer_type_t oa_placeholder_buffer_type(ggml_backend_dev_t dev, ggml_backend_buffer_type_t real);

ggml_backend_t oa_placeholder_backend(ggml_backend_dev_t dev);
