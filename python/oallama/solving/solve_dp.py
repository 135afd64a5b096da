"""Label dynamic programming: every choice of ways for the first layers that may still become the best one.

A label is a state reached with so many seconds and bytes. Labels go when another of the state dominates them, when they
cannot fit any more, and when the bound of their completions (at the prices of `solve_dual.py`) is no better than the
best path known. Labels over the cap go worst bound first, and the bound that is reported falls to theirs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

from .deadline import Deadline
from .dominance import nondominated
from .layered import Bytes, Floats, Indices
from .solve_dual import Dual
from .trellis import Path, Potentials, Trellis

EXACT = 5e-10  # relative: what may be lost for rounding errors where no gap is allowed
_CANDIDATES = 16  # times the cap: expansions looked at before the cap is applied
_PATHS = 8  # returned by a search
_FACTORS = (0.0, 0.9, 0.99, 0.998, 1.002, 1.01, 1.1)  # of the best prices; those close to 1 matter most


@dataclass(frozen=True)
class Labels:
    """Labels before one layer: state, seconds, bytes (n, K), parent label, way that led here, and what to expect.

    priced: bound of the completions at the best prices, which expansions are sorted by. bound: the best bound known.
    """

    state: Indices
    seconds: Floats
    nbytes: Bytes
    parent: Indices
    way: Indices
    priced: Floats
    bound: Floats

    def pick(self, index: Indices | NDArray[np.bool_]) -> Labels:
        return Labels(*(getattr(self, field.name)[index] for field in fields(self)))


@dataclass(frozen=True)
class Search:
    """What a search found.

    paths: the best known and others that fit, by seconds; empty if none is known. bound: no path that fits takes fewer
    seconds. cut: by the cap or by time, so that more may be found.
    """

    paths: tuple[Path, ...]
    bound: float
    cut: bool


def worth_finding(best: Path | None, gap: float) -> float:
    """Seconds above which no path is worth finding: `best` is within `gap` of them, by more than rounding errors."""
    return np.inf if best is None else best.seconds / (1 + max(gap, EXACT)) * (1 + 1e-12)


def search(
    trellis: Trellis, dual: Dual, least: Bytes, *, gap: float, labels: int, deadline: Deadline, below: float = np.inf
) -> Search:
    """Searches for paths faster than `dual.incumbent` by more than `gap` (relative), with at most `labels` per layer.

    below: look only for paths that take fewer seconds than this, a guess; a small one makes the search fast and sharp.
    least: (layers + 1, S, K) bytes from `trellis.least_bytes`. Without a cut, the search proves that no path is faster
    than its bound; with no path found, no cut and no guess there is none that fits (bound inf).
    """
    run = _Run(trellis, dual, least, gap, labels, below)
    for at in range(len(trellis.layers)):
        if deadline.is_passed:
            return Search(run.paths(), dual.bound, True)
        run.advance(at)
        if run.best is not None and run.best.seconds <= dual.bound * (1 + run.gap):
            return Search(run.paths(), dual.bound, False)
    return Search(run.paths(), max(dual.bound, min(run.cutoff, run.lost)), run.lost < run.cutoff)


class _Run:
    """One search: the labels of every layer, so that paths can be read back, and `lost`, the least bound given up."""

    def __init__(self, trellis: Trellis, dual: Dual, least: Bytes, gap: float, labels: int, below: float) -> None:
        self.trellis, self.least, self.gap, self.cap = trellis, least, gap, labels
        self.at = [dual.at, *(trellis.potentials(prices) for prices in around(dual.at.prices))]
        self.views = _Views.of(trellis, self.at)
        self.best = dual.incumbent
        self.cutoff = min(below, worth_finding(self.best, gap))
        # Bounds hardly differ between labels that are on their way to a good path; those to keep are drawn among them,
        # or all would have taken much the same bytes and none would come out close to the capacity.
        self.spread = max(self.cutoff - dual.bound, 0.0) if np.isfinite(self.cutoff) else 0.0
        self.random = np.random.default_rng(0)
        self.lost = np.inf
        self.met: list[tuple[float, int, int, int]] = []  # seconds, layer, label, the view that completes it
        start, n = trellis.start, len(trellis.start)
        none, zero = np.full(n, -1, dtype=np.intp), np.zeros(n)
        labels_now = Labels(start, zero, np.zeros((n, len(trellis.capacity)), dtype=np.int64), none, none, zero, zero)
        self.layers = [self._bounded(0, labels_now)]
        self._complete(0)

    def advance(self, at: int) -> None:
        """Expands the labels before layer `at` into those after it."""
        labels = self._bounded(at + 1, self._expand(at))
        labels = labels.pick(nondominated(labels.state, labels.seconds, labels.nbytes))
        if len(labels.state) > self.cap:
            drawn = labels.bound + self.spread * self.random.random(len(labels.bound))
            order = np.argpartition(drawn, self.cap)
            self.lost = min(self.lost, float(labels.bound[order[self.cap :]].min()))
            labels = labels.pick(np.sort(order[: self.cap]))
        self.layers.append(labels)
        self._complete(at + 1)

    def _expand(self, at: int) -> Labels:
        """The labels with all ways that may enter there and keep the bound below the cutoff; the best if too many."""
        now, one, view = self.layers[at], self.trellis.classes[self.trellis.layers[at]], self.at[0]
        # What a way costs over the best continuation of the state it is entered in: >= 0 but for rounding.
        with np.errstate(invalid="ignore"):
            regret = view.costs[self.trellis.layers[at]] + view.after[at + 1][one.leave] - view.after[at][one.enter]
        groups = []
        for state in np.unique(now.state):
            first, last = np.searchsorted(one.enter, (state, state + 1))
            order = first + np.argsort(regret[first:last], kind="stable")
            groups.append((np.flatnonzero(now.state == state), order, regret[order]))
        limit = self._limit(now.priced, groups)
        parents, ways = [np.empty(0, np.intp)], [np.empty(0, np.intp)]
        for members, order, ascending in groups:
            counts = np.searchsorted(ascending, limit - now.priced[members], side="right")
            parents.append(np.repeat(members, counts))
            ways.append(order[np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)])
        parent, way = np.concatenate(parents), np.concatenate(ways)
        seconds = now.seconds[parent] + one.seconds[way]
        nbytes = now.nbytes[parent] + one.nbytes[way]
        return Labels(one.leave[way], seconds, nbytes, parent, way, seconds, seconds)

    def _limit(self, priced: Floats, groups: list[tuple[Indices, Indices, Floats]]) -> float:
        """The bound up to which labels are expanded: the cutoff, or less if there would be too many of them."""

        def count(limit: float) -> int:
            return sum(int(np.searchsorted(r, limit - priced[m], side="right").sum()) for m, _, r in groups)

        most = self.cap * _CANDIDATES
        if count(self.cutoff) <= most:
            return self.cutoff
        highest = max(float(priced[m].max() + r[np.isfinite(r)].max(initial=0.0)) for m, _, r in groups)
        low, high = float(priced.min()), min(self.cutoff, highest)
        for _ in range(30):
            middle = (low + high) / 2
            low, high = (middle, high) if count(middle) <= most else (low, middle)
        self.lost = min(self.lost, low)
        return low

    def _bounded(self, at: int, labels: Labels) -> Labels:
        """Those labels before layer `at` that can still become, by their bounds, a path that fits and is better."""
        need = labels.nbytes + self.least[at][labels.state]
        possible = (need <= self.trellis.capacity).all(axis=1) & np.isfinite(self.at[0].after[at][labels.state])
        labels = labels.pick(possible)
        excess = (labels.nbytes - self.trellis.capacity).astype(float)
        bounds = labels.seconds + self.views.prices @ excess.T + self.views.after[at][:, labels.state]
        bound = bounds.max(axis=0)
        return replace(labels, priced=bounds[0], bound=bound).pick(bound <= self.cutoff)

    def _complete(self, at: int) -> None:
        """Completes every label by the shortest paths at all prices: remembers the fastest that fit."""
        labels = self.layers[at]
        if not len(labels.state):
            return
        rest = self.views.nbytes[at][:, labels.state]
        fits = (labels.nbytes + rest <= self.trellis.capacity).all(axis=2)
        seconds = np.where(fits, labels.seconds + self.views.seconds[at][:, labels.state], np.inf)
        for view, label in enumerate(np.argmin(seconds, axis=1).tolist()):
            if not fits[view, label]:
                continue
            found = float(seconds[view, label])
            self.met.append((found, at, label, view))
            if self.best is None or found < self.best.seconds:
                self.best = self._read(at, label, view)
                self.cutoff = min(self.cutoff, worth_finding(self.best, self.gap))

    def paths(self) -> tuple[Path, ...]:
        """The best path known and the fastest of the others met."""
        paths = [] if self.best is None else [self.best]
        met = sorted(self.met, key=lambda one: one[0])
        for seconds, at, label, view in met:
            if len(paths) == _PATHS:
                break
            if seconds > paths[-1].seconds * (1 + EXACT):
                paths.append(self._read(at, label, view))
        return tuple(paths)

    def _read(self, at: int, label: int, view: int) -> Path:
        """The path of a label before layer `at`, completed."""
        ways: list[int] = []
        rest = self.trellis.continued(self.at[view], at, int(self.layers[at].state[label]))
        for labels in reversed(self.layers[1 : at + 1]):
            ways.append(int(labels.way[label]))
            label = int(labels.parent[label])
        return self.trellis.path(ways[::-1] + rest)


def around(prices: Floats) -> Iterator[Floats]:
    """Prices that give better bounds to labels that took more or less of the memory than the best prices expect."""
    for factor in _FACTORS:
        yield prices * factor
        for k in range(len(prices) if len(prices) > 1 else 0):
            yield prices * np.where(np.arange(len(prices)) == k, factor, 1.0)


@dataclass(frozen=True)
class _Views:
    """Shortest paths to the end at V prices.

    prices: (V, K). after: (layers + 1, V, S), priced. seconds, nbytes: (layers + 1, V, S) and (layers + 1, V, S, K) of
    the same paths.
    """

    prices: Floats
    after: Floats
    seconds: Floats
    nbytes: Bytes

    @staticmethod
    def of(trellis: Trellis, at: list[Potentials]) -> _Views:
        after = np.stack([one.after for one in at], axis=1)
        seconds = np.zeros(after.shape)
        nbytes = np.zeros((*after.shape, len(trellis.capacity)), dtype=np.int64)
        views = np.arange(len(at))[:, None]
        matrices = [np.stack([one.matrices[which] for one in at]) for which in range(len(trellis.classes))]
        cheapest = [np.stack([one.cheapest_way[which] for one in at]) for which in range(len(trellis.classes))]
        for layer in range(len(trellis.layers) - 1, -1, -1):
            which = trellis.layers[layer]
            leave = np.argmin(matrices[which] + after[layer + 1][:, None, :], axis=2)
            way = cheapest[which][views, np.arange(trellis.states), leave]
            one = trellis.classes[which]
            seconds[layer] = one.seconds[way] + seconds[layer + 1][views, leave]
            nbytes[layer] = one.nbytes[way] + nbytes[layer + 1][views, leave]
        return _Views(np.stack([one.prices for one in at]), after, seconds, nbytes)
