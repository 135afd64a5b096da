"""The most layers of a family of plans that a budget holds, found by few dry runs."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from ..data.plan import PlacementPlan
from .plan_builder import DryRunPlan, PlanBuilder
from .space import too_small
from .stage import Homes

_GUESSES = 4


def largest(
    builder: PlanBuilder, plan: Callable[[int], PlacementPlan], homes: Callable[[int], Homes], most: int
) -> tuple[int, DryRunPlan]:
    """The largest n up to `most` whose dry run fits (bytes grow with n), found by few dry runs.

    Bytes of weights are known without one; what else the last one found, its KV cache in proportion to the layers, is
    the guess for others. homes: of the same plans.
    """
    limits = builder.limits

    @cache
    def known(n: int) -> tuple[list[int], list[int]]:
        placed = homes(n)
        return builder.weights(placed), [int((placed.layers == d).sum()) for d in range(1, len(limits) + 1)]

    def seems_to_fit(n: int, like: int) -> bool:
        """Whether n fits if its other bytes are those of the dry run `like`; by its weights alone without one."""
        weights, layers = known(n)
        found = runs[like].memory if like in runs else {}
        for i, name in enumerate(builder.accelerators):
            more = 0
            if name in found and builder.budgets[name].bytes_total is not None:
                more = found[name].working + found[name].kv * layers[i] // max(1, known(like)[1][i])
            if weights[i] + more > limits[i]:
                return False
        return True

    def guess(low: int, high: int, like: int) -> int:
        """The largest n in (low, high] that seems to fit, low + 1 if none does."""
        low += 1
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if seems_to_fit(middle, like) else (low, middle - 1)
        return low

    runs: dict[int, DryRunPlan] = {}
    low, high = -1, most
    n = guess(low, high, -1)
    while low < high:
        runs[n] = builder.dry_run(plan(n))
        if builder.fits(runs[n]):
            low = n
        else:
            high = n - 1
        # A guess that is off again and again is no better than the middle.
        n = guess(low, high, n) if len(runs) < _GUESSES else (low + high + 1) // 2
    if low < 0:
        # Even without a layer upstream's op_offload needs device memory for the weights it uploads.
        raise too_small(builder, runs[0])
    return low, runs[low]
