#include "kernels.h"

const oa::attend::Kernels oa::attend::base_kernels = { "base", width, &scratch_floats, &run_item };
