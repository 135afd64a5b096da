#include "product_kernels.h"

const oa::products::Kernels oa::products::avx_vnni_kernels = kernels_named("avx-vnni");
