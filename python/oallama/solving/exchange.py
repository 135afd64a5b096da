"""Makes a path that fits a faster one: two layers at a time choose their ways anew, keeping the states around them.

Labels find out what belongs together and leave some of the memory unused; pairs of ways are so many that one of them
fills it almost to the byte.
"""

from __future__ import annotations

from itertools import combinations_with_replacement

import numpy as np

from .deadline import Deadline
from .layered import Bytes, Indices
from .trellis import Path, Potentials, Trellis

_CHOICES = 60  # ways looked at for a layer, the best at the prices; 300 find no better paths
_WORTH = 1e-9  # relative gain below which an exchange is not made, so that rounding cannot make it go round in circles

Place = tuple[int, int]  # layers of this class that are run in this way are interchangeable


def exchanged(trellis: Trellis, at: Potentials, path: Path, *, deadline: Deadline) -> Path:
    """A path that fits, no slower than `path`, which fits: exchanges until none makes it faster, or until `deadline`.

    at: potentials of `trellis` at good prices; they say which ways are worth looking at.
    """
    ways = _positions(trellis, path)
    places: dict[Place, list[int]] = {}
    for layer, which in enumerate(trellis.layers):
        places.setdefault((which, ways[layer]), []).append(layer)
    choices = _Choices(trellis, at)
    left = trellis.capacity - path.nbytes
    better = True
    while better:
        better = False
        for one, two in combinations_with_replacement([place for place, layers in places.items() if layers], 2):
            if deadline.is_passed:
                return trellis.path(ways)
            if not places[one] or not places[two] or (one == two and len(places[one]) < 2):
                continue
            gain, pair, rest = choices.best(one, two, left)
            if gain <= _WORTH * path.seconds:
                continue
            better, left = True, rest
            for place, way in zip((one, two), pair, strict=True):
                layer = places[place].pop()
                ways[layer] = way
                places.setdefault((place[0], way), []).append(layer)
    return trellis.path(ways)


def _positions(trellis: Trellis, path: Path) -> list[int]:
    """The path's ways as positions in the trellis' classes, all of which it must have."""
    return [
        int(np.flatnonzero(trellis.classes[which].index == index)[0])
        for which, index in zip(trellis.layers, path.ways, strict=True)
    ]


class _Choices:
    """The ways a layer may take instead of its own without another one noticing, the most promising first."""

    def __init__(self, trellis: Trellis, at: Potentials) -> None:
        self.trellis, self.at = trellis, at
        self.known: dict[tuple[int, int, int], Indices] = {}

    def of(self, place: Place) -> Indices:
        which, way = place
        ways = self.trellis.classes[which]
        key = which, int(ways.enter[way]), int(ways.leave[way])
        if key not in self.known:
            same = np.flatnonzero((ways.enter == key[1]) & (ways.leave == key[2]))
            self.known[key] = same[np.argsort(self.at.costs[which][same], kind="stable")[:_CHOICES]]
        return self.known[key]

    def best(self, one: Place, two: Place, left: Bytes) -> tuple[float, tuple[int, int], Bytes]:
        """Seconds gained by the best ways for a layer at `one` and one at `two`, those ways, the bytes then left."""
        first, second = self.trellis.classes[one[0]], self.trellis.classes[two[0]]
        a, b = self.of(one), self.of(two)
        room = left + first.nbytes[one[1]] + second.nbytes[two[1]]
        seconds = first.seconds[a][:, None] + second.seconds[b]
        for k in range(len(room)):
            seconds[first.nbytes[a, k][:, None] > room[k] - second.nbytes[b, k]] = np.inf
        i, j = divmod(int(np.argmin(seconds)), len(b))
        gain = float(first.seconds[one[1]] + second.seconds[two[1]] - seconds[i, j])
        return gain, (int(a[i]), int(b[j])), room - first.nbytes[a[i]] - second.nbytes[b[j]]
