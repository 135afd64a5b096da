// Working memory of products by words (words.h), in floats.
#pragma once

#include "task.h"

namespace {

using namespace oa::attend;

constexpr int64_t keys_at_once = 8;

// Words of some keys, their scales as floats and as halves.
constexpr int64_t room_for_keys(int64_t d) {
    return keys_at_once * d / 2 + 2 * keys_at_once * (d / block_values);
}

// Words of a block of V, its scales, and of each row what a unit is worth and its weights as words.
constexpr int64_t room_for_values(int64_t n_rows) {
    return block_tokens * block_values / 2 + block_tokens + (n_rows + 15) / 16 * 16 + n_rows * block_tokens / 2;
}

} // namespace
