"""An instance made ready to be searched: dominated ways left out, ways sorted by states, shortest paths at any prices.

With a price (seconds per byte) on every accelerator's memory the capacity constraint becomes part of the cost, and the
best choice is a plain shortest path over the states: a few small matrices, whatever the number of ways.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .dominance import nondominated
from .layered import Bytes, Floats, Indices, Instance, LayerClass


@dataclass(frozen=True)
class Path:
    """A way for every layer (an index into the instance's class), with the sums of its seconds and bytes."""

    ways: Indices
    seconds: float
    nbytes: Bytes


@dataclass(frozen=True)
class Ways:
    """A layer class without its dominated ways, sorted by (enter, leave).

    index: (n,) which way of the instance's class it was. begins: (p,) where the ways of each pair of states that occurs
    begin.
    """

    enter: Indices
    leave: Indices
    seconds: Floats
    nbytes: Bytes
    index: Indices
    begins: Indices

    @staticmethod
    def of(ways: LayerClass) -> Ways:
        pair = np.asarray(ways.enter, np.int64) * (int(np.max(ways.leave)) + 1) + ways.leave
        return Ways.picked(nondominated(pair, np.asarray(ways.seconds, float), np.asarray(ways.nbytes, np.int64)), ways)

    @staticmethod
    def picked(index: Indices, ways: LayerClass | Ways) -> Ways:
        """The ways at `index`, which is sorted by (enter, leave); `index` of the result counts in `ways`."""
        enter, leave = (np.asarray(x, dtype=np.intp)[index] for x in (ways.enter, ways.leave))
        new = np.ones(len(index), dtype=bool)
        new[1:] = (enter[1:] != enter[:-1]) | (leave[1:] != leave[:-1])
        seconds, nbytes = np.asarray(ways.seconds, float)[index], np.asarray(ways.nbytes, np.int64)[index]
        return Ways(enter, leave, seconds, nbytes, index, np.flatnonzero(new))

    def cost(self, prices: Floats, seconds: float = 1.0) -> Floats:
        """(n,) priced cost of every way."""
        return seconds * self.seconds + self.nbytes @ prices


@dataclass(frozen=True)
class Potentials:
    """Shortest paths at some prices.

    costs: per class (n,) of its ways. matrices, cheapest_way: per class (S, S) the cheapest cost from state to state,
    inf where no way leads, and the position of the way that has it. after: (layers + 1, S) the cost from a state before
    layer l to the end, inf where there is none. value: of the whole path, from a start state.
    """

    prices: Floats
    costs: tuple[Floats, ...]
    matrices: tuple[Floats, ...]
    cheapest_way: tuple[Indices, ...]
    after: Floats
    value: float


@dataclass(frozen=True)
class Trellis:
    """The instance in the form that is searched; `states` is one more than the largest state."""

    classes: tuple[Ways, ...]
    layers: tuple[int, ...]
    capacity: Bytes
    start: Indices
    states: int

    @staticmethod
    def of(instance: Instance) -> Trellis:
        """A checked instance without its dominated ways."""
        classes = tuple(Ways.of(one) for one in instance.classes)
        states = 1 + max(max(int(c.enter.max()), int(c.leave.max())) for c in classes)
        states = max(states, 1 + max(instance.start))
        capacity = np.asarray(instance.capacity, dtype=np.int64)
        return Trellis(classes, tuple(instance.layers), capacity, np.unique(instance.start).astype(np.intp), states)

    def potentials(self, prices: Floats, seconds: float = 1.0) -> Potentials:
        """Shortest paths where a way costs `seconds` times its seconds plus prices @ its bytes."""
        costs = tuple(one.cost(prices, seconds) for one in self.classes)
        matrices, cheapest = [], []
        for one, cost in zip(self.classes, costs, strict=True):
            matrix = np.full((self.states, self.states), np.inf)
            ways = np.zeros((self.states, self.states), dtype=np.intp)
            matrix[one.enter[one.begins], one.leave[one.begins]] = np.minimum.reduceat(cost, one.begins)
            hits = np.flatnonzero(cost == matrix[one.enter, one.leave])
            ways[one.enter[hits], one.leave[hits]] = hits
            matrices.append(matrix)
            cheapest.append(ways)
        after = np.zeros((len(self.layers) + 1, self.states))
        for at in range(len(self.layers) - 1, -1, -1):
            after[at] = (matrices[self.layers[at]] + after[at + 1]).min(axis=1)
        return Potentials(prices, costs, tuple(matrices), tuple(cheapest), after, float(after[0][self.start].min()))

    def before(self, of: Potentials) -> Floats:
        """(layers + 1, S) the cheapest cost from the start to a state before layer l."""
        reach = np.full((len(self.layers) + 1, self.states), np.inf)
        reach[0][self.start] = 0.0
        for at, which in enumerate(self.layers):
            reach[at + 1] = (reach[at][:, None] + of.matrices[which]).min(axis=0)
        return reach

    def cheapest(self, of: Potentials) -> Path:
        """The shortest path itself; there must be one (`of.value` is finite)."""
        state = int(self.start[np.argmin(of.after[0][self.start])])
        return self.path(self.continued(of, 0, state))

    def continued(self, of: Potentials, at: int, state: int) -> list[int]:
        """The ways (positions) of the shortest path to the end from `state` before layer `at`."""
        ways = []
        for layer in range(at, len(self.layers)):
            way, leave = self.step(of, layer)
            ways.append(int(way[state]))
            state = int(leave[state])
        return ways

    def step(self, of: Potentials, at: int) -> tuple[Indices, Indices]:
        """Per state before layer `at`, (S,) each: the cheapest way on and the state it leaves (0 if none)."""
        which = self.layers[at]
        leave = np.argmin(of.matrices[which] + of.after[at + 1], axis=1)
        return of.cheapest_way[which][np.arange(self.states), leave], leave

    def path(self, ways: Sequence[int]) -> Path:
        """The path of one way per layer, given as positions in this trellis' classes."""
        chosen = [(self.classes[which], way) for which, way in zip(self.layers, ways, strict=True)]
        index = np.array([one.index[way] for one, way in chosen], dtype=np.intp)
        nbytes = np.array([one.nbytes[way] for one, way in chosen], dtype=np.int64).sum(axis=0)
        return Path(index, float(sum(one.seconds[way] for one, way in chosen)), nbytes)

    def fits(self, path: Path) -> bool:
        return bool((path.nbytes <= self.capacity).all())

    def least_bytes(self) -> tuple[Bytes, tuple[Path, ...]]:
        """Per accelerator, (layers + 1, S, K): the fewest bytes from a state to the end; and the smallest paths.

        A state from which there is no way to the end needs 2**62 bytes. Sums of bytes are exact below 2**53.
        """
        least = np.full((len(self.layers) + 1, self.states, len(self.capacity)), 2**62, dtype=np.int64)
        paths = []
        for k in range(len(self.capacity)):
            found = self.potentials(np.eye(len(self.capacity))[k], seconds=0.0)
            least[..., k][np.isfinite(found.after)] = found.after[np.isfinite(found.after)].astype(np.int64)
            paths.append(self.cheapest(found))
        return least, tuple(paths)

    def narrowed(self, keep: tuple[NDArray[np.bool_], ...]) -> Trellis:
        """Only the ways marked in `keep`, per class; a class that loses all its ways keeps its first."""
        classes = []
        for one, mask in zip(self.classes, keep, strict=True):
            index = np.flatnonzero(mask) if mask.any() else np.zeros(1, dtype=np.intp)
            some = Ways.picked(index, one)
            classes.append(Ways(some.enter, some.leave, some.seconds, some.nbytes, one.index[index], some.begins))
        return Trellis(tuple(classes), self.layers, self.capacity, self.start, self.states)
