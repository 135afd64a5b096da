// Bits of ggml_tensor::flags that belong to oallama. ggml itself uses the low bits only.
#pragma once

// The weight's home is the CPU and its operator runs there: op_offload must not upload it.
#define OA_TENSOR_FLAG_HOST (1 << 16)

// The weight was placed by a backend map (so the model obeys one).
#define OA_TENSOR_FLAG_MAPPED (1 << 17)

// A KV cache of such a model: the attention that reads it runs where it lives.
#define OA_TENSOR_FLAG_CACHE (1 << 18)
