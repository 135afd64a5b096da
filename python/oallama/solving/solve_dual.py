"""Prices for the accelerators' memory: the Lagrangian relaxation of the capacities, at its best.

At any prices >= 0 the shortest path's priced cost minus prices @ capacity bounds the seconds of every choice that fits.
The best prices give the bound of the linear relaxation over whole paths (Geoffrion 1974). With one accelerator they are
found by intersecting the lines of two paths (Handler & Zang 1980), with more by Kelley's cutting planes.
"""

from __future__ import annotations

from dataclasses import dataclass

import highspy
import numpy as np

from .deadline import Deadline
from .layered import Bytes, Floats
from .trellis import Path, Potentials, Trellis

_CLOSE = 1e-10  # relative: below this the bound no longer matters
_ROUNDS = 100  # prices tried; one accelerator needs about 10, two about 30
_PRICE_LIMIT = 1e6  # times the slowest choice's seconds for a whole capacity


@dataclass(frozen=True)
class Dual:
    """at: shortest paths at the best prices found. bound: seconds. incumbent: the fastest path met that fits."""

    at: Potentials
    bound: float
    incumbent: Path | None


def maximise(trellis: Trellis, smallest: tuple[Path, ...], *, deadline: Deadline) -> Dual:
    """The best prices; `smallest` are paths to begin with, the smallest on each accelerator. Stops at `deadline`."""
    found = _Found(trellis)
    fastest = found.visit(np.zeros(len(trellis.capacity)))
    for path in smallest:
        found.offer(path)
    if not trellis.fits(fastest):
        if len(trellis.capacity) == 1:
            _intersect(found, fastest, smallest[0], deadline)
        else:
            _cut(found, (fastest, *smallest), deadline)
    return Dual(found.at, found.bound, found.incumbent)


class _Found:
    """The best prices and the best path so far."""

    def __init__(self, trellis: Trellis) -> None:
        self.trellis = trellis
        self.bound = -np.inf
        self.at: Potentials
        self.incumbent: Path | None = None
        self.value = -np.inf

    def visit(self, prices: Floats) -> Path:
        """The shortest path at `prices`; keeps what is better than what is known. `value` is the bound they give."""
        at = self.trellis.potentials(prices)
        self.value = at.value - float(prices @ self.trellis.capacity)
        if self.value > self.bound:
            self.bound, self.at = self.value, at
        path = self.trellis.cheapest(at)
        self.offer(path)
        return path

    def offer(self, path: Path) -> None:
        if self.trellis.fits(path) and (self.incumbent is None or path.seconds < self.incumbent.seconds):
            self.incumbent = path


def _intersect(found: _Found, over: Path, within: Path, deadline: Deadline) -> None:
    """One accelerator: goes to the price at which a path that is too large and one that fits cost the same.

    Ends when no path is below them there. `over` is the fastest path, `within` the smallest, which fits.
    """
    capacity = int(found.trellis.capacity[0])
    for _ in range(_ROUNDS):
        price = (within.seconds - over.seconds) / float(over.nbytes[0] - within.nbytes[0])
        if price <= 0 or deadline.is_passed:
            return
        line = over.seconds + price * float(over.nbytes[0] - capacity)
        path = found.visit(np.array([price]))
        if found.value >= line - _CLOSE * abs(line):
            return
        if found.trellis.fits(path):
            within = path
        else:
            over = path


def _cut(found: _Found, paths: tuple[Path, ...], deadline: Deadline) -> None:
    """Several accelerators: every path is a plane above the dual function; go where the lowest of them is highest."""
    trellis = found.trellis
    unit = np.maximum(trellis.capacity, 1).astype(float)
    scale = max(max(path.seconds for path in paths), 1e-30)
    model = highspy.Highs()
    for option, value in (("output_flag", False), ("threads", 1), ("solver", "simplex")):
        model.setOptionValue(option, value)
    lower, upper = np.zeros(len(unit) + 1), np.full(len(unit) + 1, _PRICE_LIMIT)
    lower[0], upper[0] = -highspy.kHighsInf, highspy.kHighsInf
    for at in range(len(unit) + 1):
        model.addCol(-1.0 if at == 0 else 0.0, lower[at], upper[at], 0, [], [])
    centre = np.ones(len(unit)) / len(unit) * scale / unit
    paths = (*paths, found.visit(centre))
    columns = np.arange(len(unit) + 1, dtype=np.int32)
    for _ in range(_ROUNDS):
        for path in paths:
            row = np.r_[1.0, _excess(path, trellis.capacity) / -unit]
            model.addRow(-highspy.kHighsInf, path.seconds / scale, len(row), columns, row)
        model.run()
        if model.getModelStatus() != highspy.HighsModelStatus.kOptimal or deadline.is_passed:
            return
        highest, *prices = model.getSolution().col_value
        if highest * scale <= found.bound + _CLOSE * abs(found.bound):
            return
        paths = (found.visit(np.maximum(prices, 0.0) * scale / unit),)


def _excess(path: Path, capacity: Bytes) -> Floats:
    return (path.nbytes - capacity).astype(float)
