// Bits of ggml_tensor::flags that belong to oallama. ggml itself uses the low bits only.
#pragma once

// The weight's home is the CPU and its operator runs there: op_offload must not upload it.
#define OA_TENSOR_FLAG_HOST (1 << 16)
