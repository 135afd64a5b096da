#include "operation.h"

#include "sum.h"

#include <array>

namespace {

std::array<uint64_t, 8> fields(const oa_operation & op) {
    return { op.number,
             op.n,
             op.chunk,
             uint64_t(op.dtype),
             uint64_t(op.algorithm),
             uint64_t(op.wire),
             uint64_t(op.slices),
             uint64_t(op.device) };
}

} // namespace

int oa_operation::tag() const {
    uint64_t hash = 0;
    for (const uint64_t field : fields(*this)) {
        hash = (hash ^ field) * 0x9e3779b97f4a7c15u; // 2^64 / the golden ratio spreads small numbers
        hash ^= hash >> 29;
    }
    return int(hash >> 34);
}

std::string oa_operation::print() const {
    return std::string(oa_algorithm_name(algorithm)) + (wire == OA_WIRE_Q8 ? " (q8)" : "") + " of " +
           std::to_string(n) + " " + oa_dtype_name(oa_dtype(dtype)) + (device ? " on devices" : "") + " (operation " +
           std::to_string(number) + ")";
}

bool operator==(const oa_operation & x, const oa_operation & y) {
    return fields(x) == fields(y);
}

const char * oa_algorithm_name(int algorithm) {
    switch (algorithm) {
        case OA_STAR: return "star";
        case OA_TREE: return "tree";
        case OA_EXCHANGE: return "exchange";
        case OA_RABENSEIFNER: return "rabenseifner";
        case OA_PIPELINED: return "pipelined";
        default: return "auto";
    }
}
