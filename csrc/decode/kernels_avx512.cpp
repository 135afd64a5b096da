#include "weights_avx512.h"

#include "thin_kernels.h"

const oa::decode::Kernels oa::decode::avx512_kernels = kernels_named("avx512");
