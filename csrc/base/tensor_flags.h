// Bits of ggml_tensor::flags that belong to oallama. ggml itself uses the low bits only.
#pragma once

// The weight's home is the CPU and its operator runs there: op_offload must not upload it. An operator with this flag
// runs on the CPU.
#define OA_TENSOR_FLAG_HOST (1 << 16)

// The weight was placed by a backend map (so the model obeys one).
#define OA_TENSOR_FLAG_MAPPED (1 << 17)

// A KV cache of such a model: the attention that reads it runs where it lives.
#define OA_TENSOR_FLAG_CACHE (1 << 18)

// The home is the CPU, but the operator that reads it runs on an accelerator: a weight from some number of tokens on
// (it is streamed), a KV cache always.
#define OA_TENSOR_FLAG_STREAM (1 << 19)

// The token embedding of a model whose KV caches on the CPU are read by an accelerator.
#define OA_TENSOR_FLAG_STREAMS_CACHES (1 << 20)

// The weight is divided: its first rows or columns also live on an accelerator (segments.h).
#define OA_TENSOR_FLAG_DIVIDED (1 << 21)

// Operators of a graph with divided weights: a split starts here; it is the accelerator's part, which is handed over
// before the host's part runs; it is the host's part.
#define OA_TENSOR_FLAG_APART (1 << 22)
#define OA_TENSOR_FLAG_LEADS (1 << 23)
#define OA_TENSOR_FLAG_FOLLOWS (1 << 24)

// A weight of a model whose compute buffers are laid out offline.
#define OA_TENSOR_FLAG_ARENAS_OFFLINE (1 << 25)

// A table of the file whose rows are read when they are wanted: it takes no memory.
#define OA_TENSOR_FLAG_LAZY (1 << 26)

// The token embedding of a model whose fused attention on CPUs is computed by our kernels (own_attention.h).
#define OA_TENSOR_FLAG_ATTENDS (1 << 27)

// A weight whose products with many columns are computed on CPUs by our kernels (own_products.h).
#define OA_TENSOR_FLAG_TILED (1 << 28)

// The token embedding of a model whose layers begin and end on their own device.
#define OA_TENSOR_FLAG_WHOLE_LAYERS (1 << 29)

// A streamed weight's parameters, in its op_params, which ggml leaves alone for tensors that no operator makes.
#define OA_STREAM_FROM(tensor) ((tensor)->op_params[0])    // tokens
#define OA_STREAM_SLOTS(tensor) ((tensor)->op_params[1])   // of device memory, the same for all of a model
#define OA_STREAM_FILE(tensor) ((tensor)->op_params[2])    // number of its file from 1 (stream_source.cpp); 0: none
#define OA_STREAM_OFFSET(tensor) ((tensor)->op_params + 4) // uint64_t, bytes

// A divided weight's: the axis (oa_segment_axis) and how many of its values are the accelerator's; the parts (0: the
// accelerator's, 1: the host's) as tensors, nullptr where the part is read within the weight itself.
#define OA_SEGMENT_AXIS(tensor) ((tensor)->op_params[6])
#define OA_SEGMENT_COUNT(tensor) ((tensor)->op_params[7])
#ifdef __cplusplus
#include <cstring>

inline ggml_tensor * oa_segment_part(const ggml_tensor * weight, int side) {
    ggml_tensor * part;
    std::memcpy(&part, weight->op_params + 8 + 2 * side, sizeof(part));
    return part;
}

inline void oa_segment_part_set(ggml_tensor * weight, int side, ggml_tensor * part) {
    std::memcpy(weight->op_params + 8 + 2 * side, &part, sizeof(part));
}

// Of a weight that is in memory twice: the repacked one (twins.h); nullptr: there is none. The pointer stays in this
// process, as those above: weights on the CPU are not sent, and copies of them for other devices lack their op_params.
inline ggml_tensor * oa_twin(const ggml_tensor * weight) {
    ggml_tensor * twin;
    std::memcpy(&twin, weight->op_params + 12, sizeof(twin));
    return twin;
}

inline void oa_twin_set(ggml_tensor * weight, ggml_tensor * twin) {
    std::memcpy(weight->op_params + 12, &twin, sizeof(twin));
}

// Of a weight divided by experts: i32 [1, experts], the number of each among those of a side (oa_segments_add).
inline ggml_tensor * oa_expert_table(const ggml_tensor * weight, int side) {
    ggml_tensor * table;
    std::memcpy(&table, weight->op_params + 14, sizeof(table));
    return side == 1 ? table : oa_expert_table(table, 1);
}

inline void oa_expert_tables_set(ggml_tensor * weight, ggml_tensor * device, ggml_tensor * host) {
    std::memcpy(weight->op_params + 14, &host, sizeof(host));
    std::memcpy(host->op_params + 14, &device, sizeof(device));
}
#endif
