#include "kernels.h"

const oa::attend::Kernels oa::attend::avx512_kernels = { "avx512", width, &scratch_floats, &run_item };
