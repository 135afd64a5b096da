#include "kernels.h"

const oa::attend::Kernels oa::attend::avx2_kernels = { "avx2", has_words,       Method::columns, 26,
                                                       128,    &scratch_floats, &run_item };
