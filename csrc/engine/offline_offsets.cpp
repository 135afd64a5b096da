#include "offline_offsets.h"

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <utility>

namespace {

// Start of the smallest gap of `nbytes` or more below a sorted list of [begin, end), else the end of them all.
size_t best_gap(const std::vector<std::pair<size_t, size_t>> & taken, size_t nbytes) {
    size_t end = 0, best = 0, best_size = SIZE_MAX;
    for (const auto & [begin, next_end] : taken) {
        if (begin > end && begin - end >= nbytes && begin - end < best_size) {
            best      = end;
            best_size = begin - end;
        }
        end = std::max(end, next_end);
    }
    return best_size == SIZE_MAX ? end : best;
}

} // namespace

std::vector<size_t> oa_offline_offsets(const std::vector<oa_block> & blocks) {
    std::vector<size_t> order(blocks.size());
    std::iota(order.begin(), order.end(), 0);
    const auto rank = [&](size_t i) { return std::make_pair(blocks[i].nbytes, blocks[i].last - blocks[i].first); };
    std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return rank(a) > rank(b); });

    std::vector<size_t>                    offsets(blocks.size());
    std::vector<std::pair<size_t, size_t>> taken;
    for (size_t i = 0; i < order.size(); ++i) {
        const oa_block & block = blocks[order[i]];
        taken.clear();
        for (size_t j = 0; j < i; ++j) {
            const oa_block & other = blocks[order[j]];
            if (other.first < block.last && block.first < other.last) {
                taken.emplace_back(offsets[order[j]], offsets[order[j]] + other.nbytes);
            }
        }
        std::sort(taken.begin(), taken.end());
        offsets[order[i]] = best_gap(taken, block.nbytes);
    }
    return offsets;
}
