#include "product_kernels.h"

const oa::products::Kernels oa::products::avx512_kernels = kernels_named("avx512");
