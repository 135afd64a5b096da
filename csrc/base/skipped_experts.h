// Choices of a mixture (GGML_OP_MUL_MAT_ID) that the CPU skips: they cost nothing and give a row of zeros. So two
// devices that have different experts of one layer can compute the same choices, and their results add up. C and C++.
#pragma once

#include "ggml.h"

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

// Of the operator's op_params; 13 is OA_PRODUCTS_PARAM. The mark: the weight's last expert is nothing. Its bytes are
// zeros, for kernels that do not know the mark. A token may choose it more than once: many kernels of GPUs then write
// one of its rows, so they zero the result before (patch 0026).
#define OA_LAST_NOTHING_PARAM 14

static inline bool oa_has_nothing(const struct ggml_tensor * node) {
    return node->op_params[OA_LAST_NOTHING_PARAM] != 0;
}

// Which expert a token chose for a slot.
static inline int32_t oa_choice(const struct ggml_tensor * node, int64_t slot, int64_t token) {
    const struct ggml_tensor * ids = node->src[2];
    return *(const int32_t *) ((const char *) ids->data + slot * ids->nb[0] + token * ids->nb[1]);
}

// Whether a choice is skipped. Numbers beyond the last expert are never skipped: kernels refuse them.
static inline bool oa_skips(const struct ggml_tensor * node, int32_t id) {
    return id < 0 || (oa_has_nothing(node) && id == node->src[0]->ne[2] - 1);
}

// Zeros the rows of skipped choices, each by one thread. Kernels never write them. A thread calls it behind its part of
// the operator: until the choices are grouped, results must not be written, because a client's ids may lie in them.
static inline void oa_zero_skipped(struct ggml_tensor * node, int ith, int nth) {
    const int64_t n_slots = node->ne[1], n_choices = n_slots * node->ne[2];
    for (int64_t i = ith; i < n_choices; i += nth) {
        const int64_t slot = i % n_slots, token = i / n_slots;
        if (oa_skips(node, oa_choice(node, slot, token))) {
            memset((char *) node->data + slot * node->nb[1] + token * node->nb[2], 0, node->ne[0] * sizeof(float));
        }
    }
}
