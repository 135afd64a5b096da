#include "kernels.h"

const oa::attend::Kernels oa::attend::avx2_kernels = { "avx2", width, &scratch_floats, &run_item };
