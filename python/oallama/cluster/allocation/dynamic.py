"""The best pipeline whose devices follow a given order: dynamic programming over contiguous cuts, O(L^2 D + L D^2)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from .costs import Costs
from .outcome import Outcome


def solve_dynamic(costs: Costs, order: Sequence[int]) -> Outcome:
    """The optimum among contiguous pipelines that visit devices in `order` (by index), each once or not at all.

    The bound holds for that order.
    """
    layers = len(costs.memory)
    before = np.c_[np.zeros(len(costs.capacity)), np.cumsum(costs.compute, axis=1)]
    reach = costs.reach()
    # enter[d, p]: cheapest way to have p layers on devices before order[d] and the data on order[d].
    # leave[d, p]: the same with order[d] computing up to layer p, as the last so far.
    leave = np.full((len(order), layers + 1), math.inf)
    came_from = np.full((len(order), layers + 1), -1)
    began_at = np.full((len(order), layers + 1), -1)
    for d, device in enumerate(order):
        enter = np.full(layers + 1, math.inf)
        if costs.may_begin(device):
            enter[0] = costs.boundary[0, 0, device]
        if d:
            ways = leave[:d] + costs.boundary[:, list(order[:d]), device].T
            came_from[d] = ways.argmin(axis=0)
            enter[1:] = ways.min(axis=0)[1:]
            came_from[d, 0] = -1
        # [end, begin]: a piece ends after it begins, within the device's reach.
        ends = np.arange(layers + 1)[:, None]
        fits = (ends > np.arange(layers)) & (ends <= reach[device])
        ways = np.where(fits, (enter - before[device])[:-1], math.inf)
        began_at[d] = ways.argmin(axis=1)
        leave[d] = ways.min(axis=1) + before[device]
    totals = leave[:, layers] + costs.boundary[layers, list(order), 0]
    last = int(totals.argmin())
    if math.isinf(totals[last]):
        return Outcome(None, math.inf, "dynamic programming")
    assignment: list[int] = []
    d, p = last, layers
    while p > 0:
        begin = int(began_at[d, p])
        assignment[:0] = [order[d]] * (p - begin)
        d, p = int(came_from[d, begin]), begin
    return Outcome(tuple(assignment), float(totals[last]), "dynamic programming")


def promising_order(costs: Costs) -> list[int]:
    """Devices by what a layer costs on them when they are full: an order to begin with. A pinned one first."""
    legs = costs.boundary[0, 0, :] + costs.boundary[-1, :, 0]
    room = np.maximum(1.0, costs.capacity / max(1.0, float(costs.memory.mean())))
    seconds = costs.compute.mean(axis=1) + legs / room
    return sorted(range(len(seconds)), key=lambda i: (i != costs.first, seconds[i]))
