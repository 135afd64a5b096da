#include "weights_avx2.h"

#include "thin_kernels.h"

const oa::decode::Kernels oa::decode::avx_vnni_kernels = kernels_named("avx-vnni");
