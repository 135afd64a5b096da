#include "product_kernels.h"

const oa::products::Kernels oa::products::avx2_kernels = kernels_named("avx2");
