"""The front of the exact solver: prices, labels and, where they do not settle it, the integer program.

`solve` never claims more than it knows: the bound holds for every choice that fits, and the status says whether the
gap that was asked for has been proven.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from ..errors import OallamaError
from .deadline import Deadline
from .exchange import exchanged
from .layered import Bytes, Infeasible, Instance, Solution, check
from .solve_dp import EXACT, search, worth_finding
from .solve_dual import Dual, maximise
from .solve_milp import solve_milp
from .trellis import Path, Trellis

_LABELS = (100, 1_000, 10_000, 50_000)  # kept per layer; more only while the gap is not proven
_LABELS_FIRST = 2  # of them are tried before the integer program, with method="auto"
_ROUNDING = 1e-9  # seconds by which a sum that is zero may be below it
_GUESS = 1e-3  # relative: how close to the bound a path is looked for at first


def solve(
    instance: Instance, *, gap: float = 1e-3, time_limit_s: float = 2.0, method: Literal["auto", "dp", "milp"] = "auto"
) -> Solution:
    """The way of every layer that takes the fewest seconds in all and fits into the capacities.

    gap: stop when seconds <= bound * (1 + gap) is proven; 0 asks for the optimum (to 1e-9 relative). time_limit_s: of
    computing (`Deadline`); when it is over the best known is returned with its bound. method: "dp" (labels), "milp"
    (HiGHS), "auto" (labels first).

    Raises Infeasible where nothing fits; OallamaError for an invalid instance, where no path matches states at all, and
    where time is up before anything that fits was found.
    """
    if not gap >= 0:
        raise OallamaError(f"gap: expected a number >= 0, not {gap}")
    if not time_limit_s >= 0:
        raise OallamaError(f"time_limit_s: expected a number >= 0, not {time_limit_s}")
    if method not in ("auto", "dp", "milp"):
        raise OallamaError(f"method: expected auto, dp or milp, not {method!r}")
    deadline = Deadline(time_limit_s)
    trellis, least, dual = _priced(instance, deadline)
    return _Solver(trellis, least, dual, gap, deadline).run(method)


def lower_bound(instance: Instance, *, time_limit_s: float = 2.0) -> float:
    """Seconds that no choice within the capacities can be below, from prices alone; infinite where nothing fits.

    Raises OallamaError for an invalid instance, and where no path matches states at all.
    """
    try:
        return _priced(instance, Deadline(time_limit_s))[2].bound
    except Infeasible:
        return float("inf")


def _priced(instance: Instance, deadline: Deadline) -> tuple[Trellis, Bytes, Dual]:
    """The instance's trellis, the fewest bytes to its end, and the best prices."""
    check(instance)
    trellis = Trellis.of(instance)
    fastest = trellis.potentials(np.zeros(len(trellis.capacity))).value
    if fastest < -_ROUNDING:
        raise OallamaError(f"a way through the {len(trellis.layers)} layers takes {fastest} s: less than nothing")
    if not np.isfinite(fastest):
        raise OallamaError(f"no way through the {len(trellis.layers)} layers: states left and entered never match")
    least, smallest = trellis.least_bytes()
    _check_each(smallest, trellis.capacity)
    return trellis, least, maximise(trellis, smallest, deadline=deadline)


class _Solver:
    """The best path and bound so far."""

    def __init__(self, trellis: Trellis, least: Bytes, dual: Dual, gap: float, deadline: Deadline) -> None:
        self.trellis, self.least, self.dual, self.gap, self.deadline = trellis, least, dual, gap, deadline
        self.best, self.bound, self.method = dual.incumbent, dual.bound, "dp"

    def run(self, method: str) -> Solution:
        if method != "milp":
            self._dp(_LABELS[:_LABELS_FIRST] if method == "auto" else _LABELS)
        if method != "dp" and not self._done():
            self._milp()
        unproven = "label limit" if method == "dp" and not self.deadline.is_passed else "time limit"
        if self.best is None and np.isfinite(self.bound):
            self._search(_LABELS[0], np.inf, Deadline(np.inf))  # some milliseconds late rather than with nothing
        if self.best is None:
            self._give_up()
        return self._solution(unproven)

    def _done(self) -> bool:
        if self.best is None and np.isinf(self.bound):
            return True
        return self._proven(max(self.gap, 2 * EXACT)) or self.deadline.is_passed

    def _proven(self, gap: float) -> bool:
        return self.best is not None and self.best.seconds <= self.bound * (1 + gap)

    def _offer(self, path: Path) -> None:
        if self.best is None or path.seconds < self.best.seconds:
            self.best = path

    def _dp(self, caps: tuple[int, ...]) -> None:
        """Searches with more and more labels, guessing that there is a path close to the bound.

        A search without a cut that finds none has proven so, and raised the bound: the next guess is four times bolder.
        """
        guess = max(self.gap, _GUESS)
        for labels in caps:
            cut = False
            while not cut and not self._done():
                cut = self._search(labels, self.bound * (1 + guess) if guess < 1 else np.inf, self.deadline)
                guess = guess if cut else 4 * guess

    def _search(self, labels: int, below: float, deadline: Deadline) -> bool:
        cutoff = min(worth_finding(self.best, self.gap), below)
        trellis = self._narrowed(cutoff)
        dual = Dual(trellis.potentials(self.dual.at.prices), self.bound, self.best)
        found = search(trellis, dual, self.least, gap=self.gap, below=cutoff, labels=labels, deadline=deadline)
        self.bound = max(self.bound, found.bound)
        for path in found.paths:
            self._offer(path)
            if self._done():
                break
            self._offer(exchanged(self.trellis, self.dual.at, path, deadline=deadline))
        return found.cut

    def _milp(self) -> None:
        """The integer program over what may still be better than the best path by more than the gap."""
        cutoff = worth_finding(self.best, self.gap)
        found = solve_milp(self._narrowed(cutoff), self.best, gap=self.gap, deadline=self.deadline)
        self.best, self.bound, self.method = found.path, max(self.bound, min(cutoff, found.bound)), "milp"

    def _narrowed(self, cutoff: float) -> Trellis:
        """The trellis without the ways whose every path is bounded above `cutoff`."""
        trellis, at = self.trellis, self.dual.at
        highest = cutoff + float(at.prices @ trellis.capacity)
        before = trellis.before(at)
        keep = []
        for which, one in enumerate(trellis.classes):
            around = np.full((trellis.states, trellis.states), np.inf)
            for layer in np.flatnonzero(np.array(trellis.layers) == which):
                around = np.minimum(around, before[layer][:, None] + at.after[layer + 1])
            keep.append(at.costs[which] + around[one.enter, one.leave] <= highest)
        return trellis.narrowed(tuple(keep))

    def _give_up(self) -> None:
        capacity = self.trellis.capacity.tolist()
        if np.isinf(self.bound) and self.bound > 0:
            raise Infeasible(
                f"no choice fits into {capacity} bytes: each accelerator alone has room, together they do not"
            )
        raise OallamaError(f"nothing that fits into {capacity} bytes was found in time: raise the time limit")

    def _solution(self, unproven: str) -> Solution:
        best = self.best
        assert best is not None
        bound = min(self.bound, best.seconds)
        if self._proven(2 * EXACT):
            status = "optimal"
        elif self._proven(self.gap):
            status = "within gap"
        else:
            status = unproven
        return Solution(best.ways, best.seconds, best.nbytes, bound, status, self.method)


def _check_each(smallest: tuple[Path, ...], capacity: Bytes) -> None:
    """Raises Infeasible where even the smallest path on one accelerator exceeds it."""
    for k, path in enumerate(smallest):
        need, have = int(path.nbytes[k]), int(capacity[k])
        if need > have:
            raise Infeasible(
                f"accelerator {k}: at least {need} bytes are needed and {have} are there ({need - have} short)"
            )
