// Offsets of blocks whose lifetimes are known beforehand: GREEDY_BY_SIZE and GREEDY_BY_BREADTH of Pisarchyk and Lee,
// "Efficient Memory Management for Deep Neural Net Inference" (arXiv 2001.03288); ML Drift uses the first.
#pragma once

#include "ggml.h"

#include <cstddef>
#include <vector>

// Alive from `first` until before `last`, in any unit of time.
struct oa_block {
    size_t nbytes;
    size_t first, last;
};

// One block after the other into the smallest gap between those placed that live at the same time, else behind them:
// the largest first, or those that live when most bytes do; of equal ones the longest-lived. The better of the two.
GGML_API std::vector<size_t> oa_offline_offsets(const std::vector<oa_block> & blocks);

// Bytes up to the end of the last block.
GGML_API size_t oa_arena_end(const std::vector<oa_block> & blocks, const std::vector<size_t> & offsets);
