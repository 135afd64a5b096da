// Offsets of blocks whose lifetimes are known beforehand: GREEDY_BY_SIZE of Pisarchyk and Lee, "Efficient Memory
// Management for Deep Neural Net Inference" (arXiv 2001.03288), which ML Drift uses, too.
#pragma once

#include "ggml.h"

#include <cstddef>
#include <vector>

// Alive from `first` until before `last`, in any unit of time.
struct oa_block {
    size_t nbytes;
    size_t first, last;
};

// Largest block first (of equal ones the longest-lived, which is ours), each into the smallest gap between those placed
// that live at the same time, else behind them.
GGML_API std::vector<size_t> oa_offline_offsets(const std::vector<oa_block> & blocks);
