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

// Most bytes that are alive while each block is.
std::vector<size_t> breadths(const std::vector<oa_block> & blocks) {
    size_t end = 0;
    for (const oa_block & b : blocks) {
        end = std::max(end, b.last);
    }
    std::vector<size_t> live(end);
    for (const oa_block & b : blocks) {
        for (size_t t = b.first; t < b.last; ++t) {
            live[t] += b.nbytes;
        }
    }
    std::vector<size_t> result;
    for (const oa_block & b : blocks) {
        result.push_back(*std::max_element(live.begin() + b.first, live.begin() + b.last));
    }
    return result;
}

std::vector<size_t> place(const std::vector<oa_block> & blocks, const std::vector<size_t> & importance) {
    std::vector<size_t> order(blocks.size());
    std::iota(order.begin(), order.end(), 0);
    const auto rank = [&](size_t i) { return std::make_pair(importance[i], blocks[i].last - blocks[i].first); };
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

} // namespace

std::vector<size_t> oa_offline_offsets(const std::vector<oa_block> & blocks) {
    std::vector<size_t> sizes;
    for (const oa_block & b : blocks) {
        sizes.push_back(b.nbytes);
    }
    auto by_size    = place(blocks, sizes);
    auto by_breadth = place(blocks, breadths(blocks));
    return oa_arena_end(blocks, by_breadth) < oa_arena_end(blocks, by_size) ? by_breadth : by_size;
}

size_t oa_arena_end(const std::vector<oa_block> & blocks, const std::vector<size_t> & offsets) {
    size_t end = 0;
    for (size_t i = 0; i < blocks.size(); ++i) {
        end = std::max(end, offsets[i] + blocks[i].nbytes);
    }
    return end;
}
