"""The fast form: which device takes how many layers, by the shape of the instance.

Data that crosses a boundary by way of the client costs each device its own two legs, whatever its neighbours are. Then
equal layers are a knapsack with a fixed price per device, exact by dynamic programming (`count_layers`), and unequal
ones a cheapest path over pieces (`pieces.py`). Direct links make the order matter: `chains.py`.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from .chains import solve_chains
from .costs import Costs
from .outcome import Outcome
from .pieces import solve_pieces


def solve_grouped(costs: Costs, *, time_limit_s: float = 60.0) -> Outcome:
    """The best contiguous allocation; exact, or the best within `time_limit_s` with its bound."""
    if not costs.via_client:
        return solve_chains(costs, time_limit_s=time_limit_s)
    if len(costs.runs()) == 1 and np.array_equal(costs.boundary[0], costs.boundary[1]):
        return count_layers(costs)
    return solve_pieces(costs, time_limit_s=time_limit_s)


def count_layers(costs: Costs) -> Outcome:
    """The optimum for equal layers whose data goes via the client: O(D * L * layers that fit a device), a few ms.

    least[p] is the cheapest way to hold p layers on the devices so far: a further one takes n of them at its legs'
    price and n times its time of a layer. The device of the first layer comes first and takes at least one.
    """
    n_layers = len(costs.memory)
    size = int(costs.memory[0])
    least = np.r_[0.0, np.full(n_layers, math.inf)]
    taken = np.zeros((len(costs.capacity), n_layers + 1), int)
    order = sorted(range(len(costs.capacity)), key=lambda i: i != costs.first)
    for i in order:
        must = i == costs.first
        room = min(n_layers, int(costs.capacity[i]) // size if size else n_layers)
        if not room:
            if must:
                return Outcome(None, math.inf, "dynamic programming")
            continue
        seconds, legs = costs.compute[i, 0], costs.boundary[0, 0, i] + costs.boundary[-1, i, 0]
        # Row p - 1 of the windows: what p - room .. p - 1 layers cost before this device took the rest.
        rest = np.r_[np.full(room - 1, math.inf), least[:-1] - np.arange(n_layers) * seconds]
        windows = sliding_window_view(rest, room)
        at = windows.argmin(axis=1)
        with_it = windows[np.arange(n_layers), at] + np.arange(1, n_layers + 1) * seconds + legs
        better = (with_it < least[1:]) | must
        taken[i, 1:] = np.where(better, room - at, 0)
        least[1:] = np.where(better, with_it, least[1:])
        least[0] = math.inf if must else least[0]
    if math.isinf(least[-1]):
        return Outcome(None, math.inf, "dynamic programming")
    assignment: list[int] = []
    for i in reversed(order):
        n = int(taken[i, n_layers - len(assignment)])
        assignment[:0] = [i] * n
    return Outcome(tuple(assignment), costs.total(tuple(assignment)), "dynamic programming")
