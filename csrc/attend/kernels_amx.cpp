#include "kernels.h"

const oa::attend::Kernels oa::attend::amx_kernels = { "amx", has_words,       Method::tiles, 12,
                                                      128,   &scratch_floats, &run_item };
