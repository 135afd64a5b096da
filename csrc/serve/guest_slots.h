// Slots whose sequences may be guests (csrc/weave/guests/guest_places.h). Hooks of patch 0011.
//
// They are taken when none at home is free and a receiver has room; otherwise requests wait. Where the KV cache at home
// has no room left, those that are not guests (any more) are the first to go.
#pragma once

#include "guest_places.h"

#include <algorithm>
#include <climits>
#include <cstdlib>
#include <vector>

inline bool oa_is_guest_slot(int id) {
    static const char * first       = getenv("OALLAMA_WEAVE_FIRST_GUEST");
    static const int    first_guest = first ? atoi(first) : INT_MAX;
    return id >= first_guest;
}

// Whether a request of so many tokens may have a slot. Sequences that idle guests' slots remember make room for it.
template <class Slot>
bool oa_may_take(llama_context * ctx, const Slot & wanted, std::vector<Slot> & slots, int32_t n_tokens) {
    const auto busy = [](const Slot & slot) { return slot.is_processing(); };
    if (!oa_is_guest_slot(wanted.id) || std::none_of(slots.begin(), slots.end(), busy)) {
        return true;
    }
    for (Slot & slot : slots) {
        if (oa_weave_has_room(ctx, uint32_t(n_tokens))) {
            return true;
        }
        if (!slot.is_processing() && oa_weave_is_guest(ctx, slot.id)) {
            slot.prompt_clear();
        }
    }
    return oa_weave_has_room(ctx, uint32_t(n_tokens));
}

// The request to end where the KV cache has no room; null: none but those of slots at home. Of several answers to one
// request none is ended alone.
template <class Slot> Slot * oa_without_room(llama_context * ctx, std::vector<Slot> & slots) {
    const auto found = std::find_if(slots.rbegin(), slots.rend(), [&](const Slot & slot) {
        return slot.is_processing() && !slot.task->is_parent() && !slot.task->is_child() && oa_is_guest_slot(slot.id) &&
               !oa_weave_is_guest(ctx, slot.id);
    });
    return found == slots.rend() ? nullptr : &*found;
}

// The tokens of a slot from `first` on leave a batch; the other slots' places in it move up.
template <class Batch, class Slot> void oa_remove(Batch & batch, int32_t first, int id, std::vector<Slot> & slots) {
    std::vector<int32_t> moved; // where a token is then
    auto                 kept = batch.tokens.begin();
    for (auto token = kept; token != batch.tokens.end(); ++token) {
        moved.push_back(int32_t(kept - batch.tokens.begin()));
        if (token - batch.tokens.begin() < first || token->id_slot != id) {
            *kept++ = *token;
        }
    }
    batch.tokens.erase(kept, batch.tokens.end());
    for (Slot & slot : slots) {
        if (slot.i_batch >= 0) {
            slot.i_batch = moved[size_t(slot.i_batch)];
        }
        for (int32_t & at : slot.spec_i_batch) {
            at = moved[size_t(at)];
        }
    }
}
