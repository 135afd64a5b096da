// Which experts of a layer an accelerator has in its slots: pure functions of what was used. No memory moves here.
//
// LFRU: the score of an expert is its uses so far / (tokens since the last one + 1) (arXiv 2608.07911,
// docs/sources.md). LRU, for comparison: what was used last. Both as in python/oallama/data/expert_hits.py, which
// judges them on traces.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

enum class oa_slot_policy { lfru, lru };

struct oa_slot_rules {
    oa_slot_policy policy = oa_slot_policy::lfru;
    double margin = 0.5; // an expert enters if its score exceeds that of the worst in a slot by this share of it
};

// What was used of a layer's experts so far.
class oa_expert_uses {
  public:
    explicit oa_expert_uses(int64_t n_experts) : experts_(size_t(n_experts)) {}

    // One token's choices, the router's first one first.
    void add(const int32_t * ids, int64_t n_used);

    // The higher, the more it belongs into a slot; 0: it was never used. Of equal ones the last used comes first.
    struct score {
        double  value = 0;
        int64_t last  = 0;

        bool operator<(const score & other) const {
            return value != other.value ? value < other.value : last < other.last;
        }
    };
    score score_of(int32_t expert, oa_slot_policy policy) const;

  private:
    struct expert_uses {
        int64_t number = 0, token = 0, last = 0; // last: counted up from 1 over all choices of all tokens
    };

    std::vector<expert_uses> experts_;
    int64_t                  n_tokens_ = 0, n_choices_ = 0;
};

// A slot. Locked: its expert is being uploaded.
struct oa_slot {
    int32_t expert = -1; // -1: it is empty
    bool    locked = false;
};

struct oa_slot_change {
    size_t  slot;
    int32_t expert; // that enters
    double  gain;   // of score
};

// The best one of `candidates` enters in place of the worst expert that is not locked; nothing: all slots are better.
std::optional<oa_slot_change> oa_best_slot_change(const oa_expert_uses & uses, const std::vector<oa_slot> & slots,
                                                  const std::vector<int32_t> & candidates, const oa_slot_rules & rules);
