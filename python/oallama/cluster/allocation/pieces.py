"""Unequal layers whose data goes via the client: a cheapest path over pieces, each device at most once.

A piece (device, begin, end) fits its device and has one price: its layers and the device's two legs. Pieces that follow
each other are a path from layer 0 to the last; that a device appears once is the only constraint that couples them, so
the relaxation is tight. Pieces that cannot be on a path better than a known allocation are left out.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from ...solving.deadline import Deadline
from ...solving.highs import GAP, Program
from .costs import Assignment, Costs, Floats
from .dynamic import promising_order, solve_dynamic
from .outcome import Outcome


def solve_pieces(costs: Costs, *, time_limit_s: float = 60.0) -> Outcome:
    """The best contiguous allocation; needs costs.via_client. Exact, or the best within the limit with its bound."""
    deadline = Deadline(time_limit_s)
    known = solve_dynamic(costs, promising_order(costs))
    device, begin, end, price = _pieces(costs)
    layers = len(costs.memory)
    ahead = _cheapest(begin, end, price, layers)
    behind = _cheapest(layers - end, layers - begin, price, layers)[::-1]
    if math.isinf(ahead[layers]):
        return Outcome(None, math.inf, "grouped MILP")
    upper = math.inf if known.assignment is None else costs.total(known.assignment)
    if upper <= ahead[layers] * (1 + GAP):
        return replace(known, bound=float(ahead[layers]))
    keep = ahead[begin] + price + behind[end] <= upper * (1 + GAP)
    device, begin, end, price = device[keep], begin[keep], end[keep], price[keep]
    program = Program(price, np.ones(len(price)), np.ones(len(price), bool), scale=float(ahead[layers]))
    for p in range(layers):
        out, into = np.flatnonzero(begin == p), np.flatnonzero(end == p)
        program.row(np.r_[out, into], np.r_[np.ones(len(out)), -np.ones(len(into))], float(p == 0), float(p == 0))
    for i in np.unique(device):
        program.row(np.flatnonzero(device == i), 1.0, -np.inf, 1.0)
    if known.assignment is not None:
        program.start(_values(known.assignment, device, begin, end))
    solution = program.solve(deadline)
    if solution.values is None:
        return replace(known, bound=min(solution.bound, upper) if known.assignment else solution.bound)
    assignment = np.zeros(layers, int)
    for at in np.flatnonzero(solution.values > 0.5):
        assignment[begin[at] : end[at]] = device[at]
    return Outcome(tuple(assignment.tolist()), solution.bound, "grouped MILP")


def _pieces(costs: Costs) -> tuple[np.ndarray, np.ndarray, np.ndarray, Floats]:
    """Device, begin, end (exclusive) and seconds of every piece that fits its device."""
    layers = len(costs.memory)
    ends = np.arange(1, layers + 1)
    device, begin, at = np.nonzero((ends > np.arange(layers)[:, None]) & (ends <= costs.reach()[:, :, None]))
    usable = (begin > 0) | costs.may_begin(device)
    device, begin, end = device[usable], begin[usable], at[usable] + 1
    before = np.c_[np.zeros(len(costs.capacity)), np.cumsum(costs.compute, axis=1)]
    seconds = before[device, end] - before[device, begin]
    return device, begin, end, costs.boundary[begin, 0, device] + seconds + costs.boundary[end, device, 0]


def _cheapest(begin: np.ndarray, end: np.ndarray, price: Floats, layers: int) -> Floats:
    """[L + 1]: seconds of the cheapest path from 0 to every layer, devices used as often as they please."""
    best = np.full((layers, layers + 1), math.inf)  # of the pieces between two layers only the cheapest matters
    np.minimum.at(best, (begin, end), price)
    least = np.full(layers + 1, math.inf)
    least[0] = 0.0
    for p in range(layers):
        least = np.minimum(least, least[p] + best[p])
    return least


def _values(assignment: Assignment, device: np.ndarray, begin: np.ndarray, end: np.ndarray) -> Floats:
    held = np.array(assignment)
    first = np.r_[True, held[1:] != held[:-1]]
    last = np.r_[held[1:] != held[:-1], True]
    values = np.zeros(len(device))
    for b, e in zip(np.flatnonzero(first), np.flatnonzero(last) + 1, strict=True):
        values[(device == held[b]) & (begin == b) & (end == e)] = 1.0
    return values
