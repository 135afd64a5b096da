#include "kernels.h"

const oa::attend::Kernels oa::attend::avx512_kernels = {
    "avx512", Method::columns, 26, 64, &scratch_floats, &run_item
};
