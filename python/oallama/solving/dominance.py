"""Dominance: what is no faster and no smaller on any accelerator than another of its group can be left out.

Exact, and vectorised: one accelerator takes a sort and a running minimum, two take log2(n) of them.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .layered import Bytes, Floats, Indices


def nondominated(group: NDArray[np.integer], seconds: Floats, nbytes: Bytes) -> Indices:
    """Indices of the entries that no other entry of their group dominates, sorted by group; one of each set of equals.

    group, seconds: (n,); nbytes: (n, K). An entry dominates another of its group if it has <= seconds and <= bytes on
    every accelerator.
    """
    columns = nbytes.shape[1]
    if columns <= 1:
        order = np.lexsort((seconds, *nbytes.T, group))
        return order[_new_minimum(group[order], seconds[order])]
    order = np.lexsort((*nbytes.T[::-1], seconds, group))
    if columns == 2:
        return order[_survivors_2d(group[order], nbytes[order])]
    return order[_survivors(group[order], nbytes[order])]


def _new_minimum(group: NDArray[np.integer], value: Floats) -> NDArray[np.bool_]:
    """Which entries are smaller than all before them in their group; equal groups lie together."""
    n = len(group)
    rank = np.empty(n, dtype=np.int64)
    rank[np.argsort(value, kind="stable")] = np.arange(n)
    first = np.r_[True, group[1:] != group[:-1]][:n]
    # Each group's ranks lie below those of the groups before it, so that the running minimum starts anew with it.
    key = rank - np.cumsum(first) * n
    below = np.minimum.accumulate(key)
    # Equal values: the stable order gave the earlier one the smaller rank, so the later one is no new minimum.
    return first | np.r_[True, key[1:] < below[:-1]][:n]


def _survivors_2d(group: NDArray[np.integer], nbytes: Bytes) -> Indices:
    """Positions left of entries sorted by (group, seconds, bytes): no earlier one of the group has <= bytes on both.

    Bottom-up divide and conquer: at level k the right half of every block of 2^(k+1) positions asks its left half for
    the least bytes on the second accelerator among those with no more on the first.
    """
    alive = np.arange(len(group))
    total = len(group)
    first = np.unique(nbytes[:, 0], return_inverse=True)[1].astype(np.int64)
    second = np.unique(nbytes[:, 1], return_inverse=True)[1].astype(np.int64)
    span = np.int64(total + 1)
    segment_of = np.cumsum(np.r_[0, group[1:] != group[:-1]][:total]).astype(np.int64)
    shift = 0
    while (1 << shift) < total:
        right = (alive >> shift) & 1
        # A block that two groups share falls into two segments; both are in order of position, so ids stay sorted.
        segment = (alive >> (shift + 1)) + segment_of[alive]
        by = np.argsort((segment * span + first[alive]) * 2 + right, kind="stable")
        is_right = right[by] == 1
        offset = segment[by] * span
        key = np.where(is_right, total, second[alive[by]]) - offset
        least = np.minimum.accumulate(key)
        lost = is_right & (least <= second[alive[by]] - offset)
        keep = np.ones(len(alive), dtype=bool)
        keep[by[lost]] = False
        alive = alive[keep]
        shift += 1
    return alive


def _survivors(group: NDArray[np.integer], nbytes: Bytes) -> Indices:
    """The same for any number of accelerators, by comparing every entry with the survivors before it."""
    kept: list[int] = []
    begins = 0
    for at in range(len(group)):
        if at and group[at] != group[at - 1]:
            begins = len(kept)
        if not (nbytes[kept[begins:]] <= nbytes[at]).all(axis=1).any():
            kept.append(at)
    return np.array(kept, dtype=np.intp)
