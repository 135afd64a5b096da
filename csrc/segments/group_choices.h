// Groups the choices of a mixture by their experts where the last expert is nothing (skipped_experts.h), which a token
// may choose more than once. ggml-cuda's own grouping takes every expert once per token at most. For CUDA, and for a
// CPU.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define OA_ON_BOTH __host__ __device__
#else
#define OA_ON_BOTH
#endif

// As the arguments of ggml_cuda_launch_mm_ids_helper, which say what the results are.
struct oa_choice_groups {
    const int32_t * ids; // [n_tokens][n_used], rows ids_stride apart
    int32_t *       ids_src1;
    int32_t *       ids_dst;
    int32_t *       bounds; // [n_experts + 1]; nothing has no rows
    int             n_experts;
    int             n_tokens;
    int             n_used;
    int             n_rows; // of a token in src1: 1 or n_used
    int             ids_stride;
    int             token_stride; // in rows of src1
    bool            inverse;
};

// Numbers are from 0 on: -1 is the host's (skipped_experts.h). One expert, by a warp: ballot(f) has the bit of each of
// its 32 lanes for which f(lane) holds, each(mask, f) calls f(lane) for those in mask. Nothing's choices get rows too,
// which are read but not multiplied.
template <typename Warp>
OA_ON_BOTH void oa_group_choices_of(const Warp & warp, const oa_choice_groups & g, int expert) {
    const int  n  = g.n_tokens * g.n_used;
    const auto id = [&](int choice) { return g.ids[choice / g.n_used * g.ids_stride + choice % g.n_used]; };

    int first = 0;
    for (int from = 0; from < n; from += 32) {
        first += warp.count(warp.ballot([&](int lane) { return from + lane < n && id(from + lane) < expert; }));
    }
    int row = first;
    for (int from = 0; from < n; from += 32) {
        const uint32_t mine = warp.ballot([&](int lane) { return from + lane < n && id(from + lane) == expert; });
        warp.each(mine, [&](int lane) {
            const int choice = from + lane, at = row + warp.count(mine & ((1u << lane) - 1));
            g.ids_dst[at] = choice;
            if (g.inverse) {
                g.ids_src1[choice] = at;
            } else {
                g.ids_src1[at] = choice / g.n_used * g.token_stride + choice % g.n_used % g.n_rows;
            }
        });
        row += warp.count(mine);
    }
    warp.each(1, [&](int) {
        g.bounds[expert] = first;
        if (expert == g.n_experts - 1) {
            g.bounds[g.n_experts] = first;
        }
    });
}
