"""The placement problem in the abstract: one way per layer, states that must match, bytes that must fit.

A resource-constrained shortest path: layers in a row, each run in one of the ways of its class; a way takes the state
it is entered in to the state it leaves, costs seconds, and takes bytes on K accelerators whose capacities bound the sum
over all layers. `solve.py` solves it, `trellis.py` is the form it is solved in. Nothing here knows models or devices.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..errors import OallamaError

Floats = NDArray[np.float64]
Bytes = NDArray[np.int64]
Indices = NDArray[np.intp]


class Infeasible(OallamaError):
    """No choice of ways fits into the capacities: the message says how many bytes are needed and how many there are."""


@dataclass(frozen=True)
class LayerClass:
    """All the ways one layer may be run; layers of one class are alike.

    enter, leave: (n,) states, small integers >= 0, in which the layer must be entered and which it leaves.
    seconds: (n,) finite. A way may take less than nothing where it saves what the layer before it has counted; a whole
    path may not. nbytes: (n, K) bytes the way takes on each of K accelerators, >= 0.
    """

    enter: NDArray[np.int16]
    leave: NDArray[np.int16]
    seconds: Floats
    nbytes: Bytes


@dataclass(frozen=True)
class Instance:
    """layers: the class of every layer, in order. capacity: (K,) bytes. start: states allowed before the first layer.

    Any state may be left at the end.
    """

    classes: tuple[LayerClass, ...]
    layers: tuple[int, ...]
    capacity: Bytes
    start: tuple[int, ...]


@dataclass(frozen=True)
class Solution:
    """The chosen way of every layer, and how good it is known to be.

    ways: (layers,) indices into the layer's class. seconds, nbytes: their sums; nbytes (K,) is within the capacity.
    bound: no choice within the capacity takes fewer seconds, to 1e-9 relative. method: "dp" or "milp", whichever said
    the last word. status: "optimal" (to 1e-9), "within gap" (of the gap asked for), "time limit", or "label limit"
    (method="dp" only: more labels than it may keep would be needed).
    """

    ways: Indices
    seconds: float
    nbytes: Bytes
    bound: float
    status: str
    method: str

    @property
    def gap(self) -> float:
        """How much faster a better choice could still be, as a part of `seconds`."""
        return (self.seconds - self.bound) / self.seconds if self.seconds > 0 else 0.0


def check(instance: Instance) -> None:
    """Raises OallamaError naming the first thing that makes `instance` no instance: shapes, signs, indices."""
    capacity = np.asarray(instance.capacity)
    if capacity.ndim != 1 or (capacity.size and capacity.dtype.kind not in "iu"):
        raise OallamaError(
            f"capacity: expected whole bytes, one number per accelerator, not {capacity.dtype} {capacity.shape}"
        )
    if not instance.layers:
        raise OallamaError("layers: expected at least one layer, found none")
    for at, which in enumerate(instance.layers):
        if not 0 <= which < len(instance.classes):
            raise OallamaError(f"layer {at}: expected a class 0..{len(instance.classes) - 1}, not {which}")
    if not instance.start or min(instance.start) < 0:
        raise OallamaError(f"start: expected at least one state >= 0, not {instance.start}")
    for at, one in enumerate(instance.classes):
        _check_class(f"class {at}", one, capacity.size)


def _check_class(name: str, ways: LayerClass, accelerators: int) -> None:
    n = np.size(ways.seconds)
    if n == 0:
        raise OallamaError(f"{name}: expected at least one way to run the layer, found none")
    for field, shape in (("enter", (n,)), ("leave", (n,)), ("seconds", (n,)), ("nbytes", (n, accelerators))):
        values = np.asarray(getattr(ways, field))
        if values.shape != shape:
            raise OallamaError(f"{name}: {field} must have the shape {shape}, not {values.shape}")
        if field != "seconds" and values.size and values.dtype.kind not in "iu":
            raise OallamaError(f"{name}: {field} must be whole numbers, not {values.dtype}")
        bad = ~np.isfinite(values) if field == "seconds" else values < 0
        if bad.any():
            way, expected = int(np.argwhere(bad)[0, 0]), "finite" if field == "seconds" else ">= 0"
            raise OallamaError(f"{name}, way {way}: {field} must be {expected}, not {values[way]}")
