"""The objective as arrays: what every solver minimises, in seconds. Boundary 0 follows the embedding.

Left out is what no allocation changes: w_c * n and the client's own embedding and head (`terms.py` prices them).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from ...data.budget import format_bytes
from ...errors import OallamaError
from .problem import Problem, messages

Floats: TypeAlias = NDArray[np.float64]
Bytes: TypeAlias = NDArray[np.int64]
# The device (by index) of every layer.
Assignment: TypeAlias = tuple[int, ...]

_UNITS = 1e5


@dataclass(frozen=True, eq=False)
class Costs:
    """The instance a solver sees; D devices, L layers.

    compute: [D, L]. boundary: [L + 1, D, D], seconds from device i to device k after b layers, 0 where i is k.
    memory: [L]. capacity: [D], bytes that layers may fill. via_client: boundary[b, i, k] is boundary[b, i, 0] +
    boundary[b, 0, k], so that the order of the devices does not matter. first: the device that the first layer must be
    on, None: any.
    """

    compute: Floats
    boundary: Floats
    memory: Bytes
    capacity: Bytes
    via_client: bool
    first: int | None = None

    def may_begin(self, device: int | Bytes) -> NDArray[np.bool_]:
        """Whether the first layer may be on a device, of one or of several."""
        return np.full(np.shape(device), True) if self.first is None else np.asarray(device) == self.first

    def total(self, assignment: Assignment) -> float:
        """Seconds of an allocation: compute, and every boundary it crosses, from the client and back to it."""
        n = len(assignment)
        path = np.array([0, *assignment, 0])
        return float(
            self.compute[path[1:-1], np.arange(n)].sum() + self.boundary[np.arange(n + 1), path[:-1], path[1:]].sum()
        )

    def fits(self, assignment: Assignment) -> bool:
        """Whether no device holds more than its capacity."""
        held = np.bincount(assignment, weights=self.memory, minlength=len(self.capacity))
        return bool((held <= self.capacity).all())

    def memory_row(self, device: int, layers: slice | Bytes) -> tuple[Floats, float]:
        """Coefficients of some layers and the limit of a device's capacity, scaled for HiGHS.

        In units of the bytes' common divisor, whose rest no layers can fill, unless the numbers become too large.
        """
        capacity, divisor = int(self.capacity[device]), int(np.gcd.reduce(self.memory)) or 1
        unit = max(float(divisor), capacity / _UNITS)
        return self.memory[layers] / unit, capacity // divisor * divisor / unit

    def runs(self) -> list[int]:
        """Lengths of the runs of layers that are equal to a solver: same times, bytes and output."""
        same = (
            (self.compute[:, 1:] == self.compute[:, :-1]).all(axis=0)
            & (self.memory[1:] == self.memory[:-1])
            & (self.boundary[2:] == self.boundary[1:-1]).all(axis=(1, 2))
        )
        starts = np.r_[0, 1 + np.flatnonzero(~same), len(self.memory)]
        return [int(length) for length in np.diff(starts)]

    def reach(self) -> Bytes:
        """[D, L]: the end (exclusive) of the longest contiguous piece that begins at a layer and fits the device."""
        before = np.r_[0, np.cumsum(self.memory)]
        return np.searchsorted(before, self.capacity[:, None] + before[None, :-1], side="right") - 1


def make_costs(problem: Problem) -> Costs:
    """The arrays of a problem (objective of docs/sources.md, 5).

    Raises OallamaError for a link that is needed but was not measured, when the client's own part does not fit it, and
    when the first layer must be on a device that is not there.
    """
    columns = []
    for layer, same in groupby(problem.layers):
        column = [problem.seconds_on(device, layer) for device in problem.devices]
        columns += [column] * len(list(same))
    outputs = [problem.embedding.output_bytes, *(layer.output_bytes for layer in problem.layers)]
    inner = {nbytes: _legs(problem, nbytes, last=False) for nbytes in set(outputs[:-1])}
    return Costs(
        compute=np.array(columns, float).T,
        boundary=np.stack([*(inner[nbytes] for nbytes in outputs[:-1]), _legs(problem, outputs[-1], last=True)]),
        memory=np.array([layer.memory_bytes for layer in problem.layers], np.int64),
        capacity=_capacities(problem),
        via_client=problem.links == "via-client",
        first=_first(problem),
    )


def _legs(problem: Problem, row_bytes: int, last: bool) -> Floats:
    """[D, D]: seconds of all passes from device i to device k; row_bytes: of one token. last: after the last layer."""
    names, via_client = [device.name for device in problem.devices], problem.links == "via-client"
    seconds = np.zeros((len(names), len(names)))
    for i, source in enumerate(names):
        for k, target in enumerate(names):
            if i != k and not (via_client and i and k):
                crossings = messages(problem, row_bytes, to_client=k == 0, last=last)
                link = problem.network.link(source, target)
                seconds[i, k] = sum(each.times * sum(problem.settings.crossing(link, each)) for each in crossings)
    if via_client:
        seconds = seconds[:, :1] + seconds[:1, :]
        np.fill_diagonal(seconds, 0.0)
    return seconds


def _first(problem: Problem) -> int | None:
    wanted, names = problem.settings.first_layer, [device.name for device in problem.devices]
    if wanted is not None and wanted not in names:
        raise OallamaError(f"the first layer must be on {wanted} (first_layer), expected one of {', '.join(names)}")
    return None if wanted is None else names.index(wanted)


def _capacities(problem: Problem) -> Bytes:
    limits = [int(problem.settings.beta * device.memory_bytes) for device in problem.devices]
    if limits[0]:
        limits[0] -= problem.embedding.memory_bytes
        if limits[0] < 0:
            raise OallamaError(
                f"the client {problem.client.name} is {-limits[0]} bytes ({format_bytes(-limits[0])}) short of holding "
                f"embedding and head, which stay with it; raise its memory, or leave it out to set no limit"
            )
    return np.array(limits, np.int64)
