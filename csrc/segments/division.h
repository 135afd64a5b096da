// How a weight is divided between two devices.
#pragma once

#include <cstdint>
#include <vector>

enum class oa_segment_axis { columns, rows, experts };

struct oa_division {
    oa_segment_axis      axis  = oa_segment_axis::rows;
    int64_t              count = 0; // rows or columns that the accelerator has, from the first one on; or experts
    std::vector<int32_t> experts;   // which ones, rising; those that the slots have at the beginning
    int                  slots = 0; // for experts that change; 0: they do not
};
