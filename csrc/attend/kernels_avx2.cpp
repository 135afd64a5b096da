#include "kernels.h"

const oa::attend::Kernels oa::attend::avx2_kernels = { "avx2", Method::columns, 26, 128, &scratch_floats, &run_item };
