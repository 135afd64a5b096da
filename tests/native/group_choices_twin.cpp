// csrc/segments/group_choices.h with a loop for a warp, for tests/unit/test_group_choices.py.
#include "group_choices.h"

namespace {

struct loop_warp {
    template <typename F> uint32_t ballot(const F & holds) const {
        uint32_t mask = 0;
        for (int lane = 0; lane < 32; ++lane) {
            mask |= uint32_t(holds(lane)) << lane;
        }
        return mask;
    }
    template <typename F> void each(uint32_t mask, const F & call) const {
        for (int lane = 0; lane < 32; ++lane) {
            if (mask >> lane & 1) {
                call(lane);
            }
        }
    }
    int count(uint32_t mask) const { return __builtin_popcount(mask); }
};

} // namespace

extern "C" void group_choices(const oa_choice_groups * groups) {
    for (int expert = 0; expert < groups->n_experts; ++expert) {
        oa_group_choices_of(loop_warp(), *groups, expert);
    }
}
