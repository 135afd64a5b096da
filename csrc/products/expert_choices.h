// The choices of a mixture (GGML_OP_MUL_MAT_ID) in the order of the experts.
#pragma once

#include "ggml.h"
#include "product_task.h"

#include <cstdint>

namespace oa::products {

// begins[e] .. begins[e + 1]: the choices of expert e, in the order of the tokens. Skipped ones are left out.
void group_choices(const ggml_tensor * mixture, int32_t * begins, Choice * choices);

} // namespace oa::products
