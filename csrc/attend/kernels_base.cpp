#include "kernels.h"

const oa::attend::Kernels oa::attend::base_kernels = { "base", has_words,       Method::columns, 26,
                                                       64,     &scratch_floats, &run_item };
