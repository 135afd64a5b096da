#include "product_kernels.h"

const oa::products::Kernels oa::products::base_kernels = kernels_named("base");
