// Slots whose sequences may be guests (csrc/weave/guest_hooks.h): taken when none at home is free. Hook of patch 0011.
#pragma once

#include <climits>
#include <cstdlib>

inline bool oa_is_guest_slot(int id) {
    static const char * first       = getenv("OALLAMA_WEAVE_FIRST_GUEST");
    static const int    first_guest = first ? atoi(first) : INT_MAX;
    return id >= first_guest;
}
