#include "slot_policy.h"

#include <algorithm>

namespace {

using score = oa_expert_uses::score;

bool is_in(const std::vector<oa_slot> & slots, int32_t expert) {
    return std::any_of(slots.begin(), slots.end(), [&](const oa_slot & slot) { return slot.expert == expert; });
}

// The slot of the lowest score that is not locked; the end: all are.
std::vector<oa_slot>::const_iterator worst_of(const oa_expert_uses & uses, const std::vector<oa_slot> & slots,
                                              oa_slot_policy policy, score & lowest) {
    auto worst = slots.end();
    for (auto slot = slots.begin(); slot != slots.end(); ++slot) {
        if (slot->locked) {
            continue;
        }
        const score own = slot->expert < 0 ? score{ -1, 0 } : uses.score_of(slot->expert, policy);
        if (worst == slots.end() || own < lowest) {
            worst  = slot;
            lowest = own;
        }
    }
    return worst;
}

} // namespace

void oa_expert_uses::add(const int32_t * ids, int64_t n_used) {
    n_choices_ += n_used;
    for (int64_t rank = 0; rank < n_used; ++rank) {
        expert_uses & own = experts_[size_t(ids[rank])];
        ++own.number;
        own.token = n_tokens_;
        own.last  = n_choices_ - rank;
    }
    ++n_tokens_;
}

score oa_expert_uses::score_of(int32_t expert, oa_slot_policy policy) const {
    const expert_uses & own = experts_[size_t(expert)];
    if (policy == oa_slot_policy::lru) {
        return { double(own.last), own.last };
    }
    return { double(own.number) / double(n_tokens_ - own.token), own.last };
}

std::optional<oa_slot_change> oa_best_slot_change(const oa_expert_uses & uses, const std::vector<oa_slot> & slots,
                                                  const std::vector<int32_t> & candidates,
                                                  const oa_slot_rules &        rules) {
    score   best;
    int32_t entering = -1;
    for (const int32_t expert : candidates) {
        const score own = uses.score_of(expert, rules.policy);
        if ((entering < 0 || best < own) && !is_in(slots, expert)) {
            entering = expert;
            best     = own;
        }
    }
    if (entering < 0) {
        return std::nullopt;
    }
    score      lowest;
    const auto worst = worst_of(uses, slots, rules.policy, lowest);
    if (worst == slots.end()) {
        return std::nullopt;
    }
    if (worst->expert >= 0) {
        lowest.value += rules.policy == oa_slot_policy::lfru ? lowest.value * rules.margin : 0;
    }
    if (!(lowest < best)) {
        return std::nullopt;
    }
    return oa_slot_change{ size_t(worst - slots.begin()), entering, best.value - std::max(0.0, lowest.value) };
}
