// Bits of ggml_tensor::flags that belong to oallama. ggml itself uses the low bits only.
#pragma once

// The weight's home is the CPU and its operator runs there: op_offload must not upload it.
#define OA_TENSOR_FLAG_HOST (1 << 16)

// The weight was placed by a backend map (so the model obeys one).
#define OA_TENSOR_FLAG_MAPPED (1 << 17)

// A KV cache of such a model: the attention that reads it runs where it lives.
#define OA_TENSOR_FLAG_CACHE (1 << 18)

// The weight's home is the CPU; from this many tokens on (1 to 2047, the bits above) its operator runs on an
// accelerator, to which it is streamed.
#define OA_TENSOR_FLAG_STREAM (1 << 19)
#define OA_TENSOR_STREAM_SHIFT 20
#define OA_TENSOR_STREAM_MAX 2047
#define OA_TENSOR_STREAM_FROM(flags) (((flags) >> OA_TENSOR_STREAM_SHIFT) & OA_TENSOR_STREAM_MAX)
