// What happened to guests of all contexts of this process, for whoever knows the process and not a context.
#pragma once

#include "llama.h"

#include <atomic>
#include <cstdint>

namespace oa::weave {

// Why the attention of a guest came home.
enum class Loss { failed, called_back, no_room, shared };

constexpr int n_losses = 4;

struct GuestTotals {
    std::atomic<uint64_t> came{ 0 };
    std::atomic<uint64_t> lost[n_losses] = {}; // by Loss
    std::atomic<uint64_t> rows{ 0 };           // of layers whose attention was computed elsewhere
    std::atomic<uint64_t> appended_rows{ 0 };  // of layers of which K and V alone were sent
    std::atomic<uint64_t> waited_ns{ 0 };      // for results, and for slots that are free
    std::atomic<int64_t>  now{ 0 };            // guests that are with receivers
};

LLAMA_API GuestTotals & guest_totals();

} // namespace oa::weave
