"""OATO's operator scheduler: which operators run on the device (Zhang et al., J. NUDT 47(6), 2025, Algorithm 1).

Pure arrays in, pure arrays out. `tests/support/reference_oato.py` is the slow literal counterpart that tests use.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import OallamaError

Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]


class Edge(NamedTuple):
    """Operators `i` and `j` exchange data that costs `seconds` whenever they sit on different devices."""

    i: int
    j: int
    seconds: float


class Anchor(NamedTuple):
    """Operator `i` exchanges data with a neighbour that never moves: on the device, or on the host."""

    i: int
    on_device: bool
    seconds: float


@dataclass(frozen=True)
class OatoResult:
    """A placement and how it was found.

    on_device: bool per operator. affinity: G in [0, 1] of the iteration that gave the placement. order: operators by
    descending affinity. iterations: transfer corrections computed. reason: "converged" (the affinities stopped
    changing), "cycle" (a placement came back) or "bound". predicted_seconds: of the placement, transfers included.
    """

    on_device: Mask
    affinity: Floats
    order: NDArray[np.intp]
    iterations: int
    reason: Literal["converged", "cycle", "bound"]
    predicted_seconds: float


def schedule(
    t_host: Sequence[float] | Floats,
    t_device: Sequence[float] | Floats,
    nbytes: Sequence[int] | NDArray[np.int64],
    capacity: float,
    *,
    edges: Sequence[Edge] = (),
    anchors: Sequence[Anchor] = (),
    fraction: float = 0.90,
    fill: Literal["prefix", "skip"] = "prefix",
    skip_negative: bool = False,
    transfer: Literal["current", "marginal"] = "current",
    max_iterations: int = 64,
    predict: Callable[[Mask], float] | None = None,
) -> OatoResult:
    """Algorithm 1: fill `fraction` of `capacity` bytes with the operators that save most seconds per byte.

    t_host, t_device: seconds of each operator on either side. nbytes: bytes of its weight (> 0). The defaults are the
    paper's; three parameters repair what it leaves open:

    - fill: "prefix" stops at the first operator that does not fit (the paper's running sum); "skip" leaves that one on
      the host and goes on, so the tail of the memory is used.
    - skip_negative: leave operators on the host that the device would not make faster (B <= 0); the paper fills the
      memory with them as well.
    - transfer: what T' subtracts from an operator's gain. "current": the transfers it causes where it sits now, the
      paper's words. "marginal": transfers if it were on the device minus transfers if it were on the host, its
      neighbours as they are now; so an operator that sits on the host between device neighbours is drawn in, not
      pushed away.

    Ties keep the operators' own order (stable sort). If all B are equal every G is 1. `predict` values a placement in
    seconds (default: operator times plus the given edges); the best placement met is returned, the earliest of equals.

    Termination. T' depends on the current placement alone, hence so do B, G, the order and the next placement: the loop
    iterates a deterministic function on the finite set of 2^n placements. It stops when a placement repeats - its
    predecessor ("converged": the next affinities would be the same numbers) or an earlier one ("cycle": the loop would
    go round for ever) - which happens after at most 2^n steps, and in any case after `max_iterations` ("bound").

    Raises OallamaError for arrays of different length, non-positive bytes or times that are not finite.

    >>> schedule([3.0, 9.0], [1.0, 1.0], [10, 10], capacity=10, fraction=1.0).on_device.tolist()
    [False, True]
    """
    host, device, size = _checked(t_host, t_device, nbytes)
    links = _Links(len(size), edges, anchors)
    limit = fraction * capacity

    def place(extra: Floats) -> tuple[Floats, NDArray[np.intp], Mask]:
        benefit = (host - device - extra) / size
        affinity = normalised(benefit)
        order = np.argsort(-affinity, kind="stable")
        candidates = order[benefit[order] > 0] if skip_negative else order
        return affinity, order, _fill(candidates, size, limit, fill)

    def seconds(plan: Mask) -> float:
        if predict is not None:
            return predict(plan)
        return float(np.where(plan, device, host).sum()) + links.total(plan)

    affinity, order, plan = place(np.zeros(len(size)))
    best = (seconds(plan), plan, affinity, order)
    seen = {plan.tobytes()}
    reason: Literal["converged", "cycle", "bound"] = "bound"
    iterations = 0
    while iterations < max_iterations:
        previous = plan
        affinity, order, plan = place(links.current(plan) if transfer == "current" else links.marginal(plan))
        iterations += 1
        total = seconds(plan)
        if total < best[0]:
            best = (total, plan, affinity, order)
        if plan.tobytes() in seen:
            reason = "converged" if np.array_equal(plan, previous) else "cycle"
            break
        seen.add(plan.tobytes())
    total, plan, affinity, order = best
    return OatoResult(plan, affinity, order, iterations, reason, total)


class _Links:
    """Edges and anchors as arrays."""

    def __init__(self, n: int, edges: Sequence[Edge], anchors: Sequence[Anchor]) -> None:
        self.n = n
        edges = [e for e in edges if e.i != e.j]  # an operator never sits opposite itself
        self.i = np.array([e.i for e in edges], dtype=np.intp)
        self.j = np.array([e.j for e in edges], dtype=np.intp)
        self.cost = np.array([e.seconds for e in edges], dtype=np.float64)
        self.at = np.array([a.i for a in anchors], dtype=np.intp)
        self.side = np.array([a.on_device for a in anchors], dtype=bool)
        self.anchor_cost = np.array([a.seconds for a in anchors], dtype=np.float64)

    def total(self, plan: Mask) -> float:
        """Seconds of all transfers of a placement; each edge counts once."""
        crossing = self.cost[plan[self.i] != plan[self.j]].sum()
        return float(crossing + self.anchor_cost[plan[self.at] != self.side].sum())

    def current(self, plan: Mask) -> Floats:
        """T': seconds of the transfers each operator takes part in."""
        crossing = plan[self.i] != plan[self.j]
        return self._sums(crossing, crossing, plan[self.at] != self.side)

    def marginal(self, plan: Mask) -> Floats:
        """Transfers of each operator if it were on the device minus those if it were on the host."""
        on_device = self._sums(~plan[self.j], ~plan[self.i], ~self.side)
        return on_device - self._sums(plan[self.j], plan[self.i], self.side)

    def _sums(self, for_i: Mask, for_j: Mask, for_anchor: Mask) -> Floats:
        sums: Floats = np.zeros(self.n)
        sums += np.bincount(self.i, self.cost * for_i, self.n)
        sums += np.bincount(self.j, self.cost * for_j, self.n)
        sums += np.bincount(self.at, self.anchor_cost * for_anchor, self.n)
        return sums


def _checked(t_host: object, t_device: object, nbytes: object) -> tuple[Floats, Floats, Floats]:
    host, device, size = (np.asarray(a, dtype=np.float64).reshape(-1) for a in (t_host, t_device, nbytes))
    if not len(host) == len(device) == len(size):
        raise OallamaError(f"one time per side and one size per operator: got {len(host)}, {len(device)}, {len(size)}")
    if not (np.isfinite(host).all() and np.isfinite(device).all()):
        raise OallamaError("operator times must be finite seconds; record the profile again")
    if (size <= 0).any():
        raise OallamaError("every operator to place must have a weight of at least one byte")
    return host, device, size


def normalised(benefit: Floats) -> Floats:
    """GPU affinities G in [0, 1] of seconds saved per byte; all 1 where every operator saves as much."""
    if not len(benefit):
        return benefit
    low, high = benefit.min(), benefit.max()
    if high == low:
        return np.ones(len(benefit))
    affinity: Floats = (benefit - low) / (high - low)
    return affinity


def _fill(order: NDArray[np.intp], size: Floats, limit: float, fill: Literal["prefix", "skip"]) -> Mask:
    chosen = np.zeros(len(size), dtype=bool)
    if fill == "prefix":
        chosen[order[np.cumsum(size[order]) <= limit]] = True
        return chosen
    used = 0.0
    for i in order:
        if used + size[i] <= limit:
            used += size[i]
            chosen[i] = True
    return chosen
