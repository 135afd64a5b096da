#include "expert_choices.h"

#include "skipped_experts.h"

#include <algorithm>
#include <numeric>

namespace oa::products {

void group_choices(const ggml_tensor * mixture, int32_t * begins, Choice * choices) {
    const int64_t n_experts = mixture->src[0]->ne[2], n_slots = mixture->ne[1], n_tokens = mixture->ne[2];
    const auto    expert_of = [&](int64_t slot, int64_t token) { // -1: the choice is skipped
        const int32_t expert = oa_choice(mixture, slot, token);
        GGML_ASSERT(expert < n_experts); // ids may come by network
        return oa_skips(mixture, expert) ? -1 : expert;
    };
    std::fill(begins, begins + n_experts + 1, 0);
    for (int64_t token = 0; token < n_tokens; ++token) {
        for (int64_t slot = 0; slot < n_slots; ++slot) {
            if (const int32_t expert = expert_of(slot, token); expert >= 0) {
                ++begins[expert + 1];
            }
        }
    }
    std::partial_sum(begins, begins + n_experts + 1, begins);
    const int32_t n_choices = begins[n_experts];
    for (int64_t token = n_tokens - 1; token >= 0; --token) {
        for (int64_t slot = n_slots - 1; slot >= 0; --slot) {
            if (const int32_t expert = expert_of(slot, token); expert >= 0) {
                choices[--begins[expert + 1]] = { int32_t(slot), int32_t(token) };
            }
        }
    }
    // Now begins[e + 1] is where expert e begins.
    std::rotate(begins, begins + 1, begins + n_experts + 1);
    begins[n_experts] = n_choices;
}

} // namespace oa::products
