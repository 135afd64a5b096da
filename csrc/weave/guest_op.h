// The mark by which a device's backend knows the two custom operators of guest_graph.cpp. Without it they are functions
// of the CPU, as all custom operators.
#pragma once

#include "ggml.h"
#include "protocol.h"

#include <cstring>

namespace oa::weave {

struct GuestOp {
    enum class Kind : uint32_t { none, send = 0x4f475331, receive = 0x4f475231 };

    Kind               kind;
    uint32_t           sender; // its number
    const AttendTask * task;   // of the layer; rows are the tensors'
};

// Behind what ggml keeps of a custom operator (24 bytes).
constexpr size_t guest_op_param = (GGML_MAX_OP_PARAMS - sizeof(GuestOp)) / sizeof(int32_t);
static_assert(guest_op_param * sizeof(int32_t) >= 24, "a custom operator has room for the mark");

inline void set_guest_op(ggml_tensor * node, const GuestOp & op) {
    memcpy(node->op_params + guest_op_param, &op, sizeof(op));
}

inline GuestOp guest_op(const ggml_tensor * node) {
    GuestOp op = {};
    if (node->op == GGML_OP_CUSTOM) {
        memcpy(&op, node->op_params + guest_op_param, sizeof(op));
    }
    return op.kind == GuestOp::Kind::send || op.kind == GuestOp::Kind::receive ? op : GuestOp{};
}

} // namespace oa::weave
