// What one all-reduce is: every rank must ask for the same.
#pragma once

#include "comm_types.h"

#include <cstdint>
#include <string>

struct oa_operation {
    uint64_t number    = 0; // operations before this one
    uint64_t n         = 0; // elements
    uint64_t chunk     = 0; // elements at a time
    int32_t  dtype     = OA_F32;
    int32_t  algorithm = OA_AUTO; // as resolved
    int32_t  wire      = OA_WIRE_NATIVE;
    int32_t  slices    = 0; // inside a host: every rank sums a slice (1), or its LM (on devices: every rank) all (0)
    int32_t  device    = 0; // values in device memory, summed there

    // 30 bits that differ between different operations: what the tag of its messages is made of.
    int         tag() const;
    std::string print() const; // "star of 12 float32 (operation 3)"
};

bool operator==(const oa_operation & x, const oa_operation & y);

const char * oa_algorithm_name(int algorithm);
