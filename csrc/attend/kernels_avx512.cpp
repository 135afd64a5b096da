#include "kernels.h"

const oa::attend::Kernels oa::attend::avx512_kernels = { "avx512", has_words,       Method::columns, 48,
                                                         192,      &scratch_floats, &run_item };
