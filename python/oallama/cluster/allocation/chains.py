"""Direct links: the order of the devices matters. A path over (device, run of equal layers) and counts along it.

An arc leaves a node for another device in the same run, or for any device in the next run; n[node] layers of the run
are computed at a node that is visited. Arcs inside a run could close a circle apart from the path: such circles are cut
off when they appear. A device is entered once, so that its layers are consecutive.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from ...solving.deadline import Deadline
from ...solving.highs import Program
from .costs import Assignment, Costs, Floats
from .dynamic import promising_order, solve_dynamic
from .outcome import Outcome


def solve_chains(costs: Costs, *, time_limit_s: float = 60.0) -> Outcome:
    """The best contiguous allocation for any links; exact, or the best within `time_limit_s` with its bound."""
    deadline = Deadline(time_limit_s)
    chains, bound, tightened = _Chains(costs), -math.inf, False
    while True:
        solution = chains.program.solve(deadline)
        if not tightened:  # what follows no longer bounds the instance itself
            bound = max(bound, solution.bound)
        if solution.values is None:
            if bound == math.inf:
                return Outcome(None, bound, "grouped MILP")
            return replace(solve_dynamic(costs, promising_order(costs)), bound=bound)
        values = np.rint(solution.values)
        if chains.cut_circles(values):
            continue
        assignment = chains.assignment(values)
        if costs.fits(assignment):
            return Outcome(assignment, bound, "grouped MILP")
        chains.tighten(assignment)
        tightened = True


class _Chains:
    """Columns: a count and a visit for every node, then the arcs."""

    def __init__(self, costs: Costs) -> None:
        self.costs = costs
        self.lengths = costs.runs()
        self.begins = np.r_[0, np.cumsum(self.lengths)]
        self.devices = len(costs.capacity)
        self.sizes = costs.memory[self.begins[:-1]]
        self.rooms = self._rooms()
        self.tail, self.head, self.seconds = self._arcs()
        self.nodes = self.rooms.size
        self.arcs = 2 * self.nodes + np.arange(len(self.tail))
        self.program = self._program()

    def _rooms(self) -> np.ndarray:
        """[D, runs]: layers of a run that fit a device."""
        fit = self.costs.capacity[:, None] // np.maximum(1, self.sizes)
        return np.minimum(np.where(self.sizes > 0, fit, max(self.lengths)), self.lengths)

    def node(self, device: np.ndarray | int, run: np.ndarray | int) -> np.ndarray:
        return np.asarray(device) * len(self.lengths) + run

    def _arcs(self) -> tuple[np.ndarray, np.ndarray, Floats]:
        """Tail and head node (-1: the client's embedding or head) and seconds of every arc."""
        every = np.arange(self.devices)
        i, k = np.indices((self.devices, self.devices)).reshape(2, -1)
        other = i != k
        parts = [(np.full(self.devices, -1), self.node(every, 0), self.costs.boundary[0, 0])]
        for run, end in enumerate(self.begins[1:]):
            if self.lengths[run] > 1:
                inside = self.costs.boundary[end - 1]
                parts.append((self.node(i[other], run), self.node(k[other], run), inside[i[other], k[other]]))
            if run + 1 < len(self.lengths):
                parts.append((self.node(i, run), self.node(k, run + 1), self.costs.boundary[end].ravel()))
        parts.append(
            (self.node(every, len(self.lengths) - 1), np.full(self.devices, -1), self.costs.boundary[-1, :, 0])
        )
        tail, head, seconds = (np.concatenate(part) for part in zip(*parts, strict=True))
        rooms = np.r_[self.rooms.ravel(), 1]  # the last stands for the client's ends
        begins = self.costs.may_begin(head // len(self.lengths))
        usable = (rooms[tail] > 0) & (rooms[head] > 0) & ((tail >= 0) | begins)
        return tail[usable], head[usable], seconds[usable]

    def _program(self) -> Program:
        per_layer = self.costs.compute[:, self.begins[:-1]].ravel()
        cost = np.r_[per_layer, np.zeros(self.nodes), self.seconds]
        rooms = self.rooms.ravel()
        upper = np.r_[rooms, np.minimum(rooms, 1), np.ones(len(self.tail))].astype(float)
        scale = float((self.costs.compute.min(axis=0)).sum())
        program = Program(cost, upper, np.ones(len(cost), bool), scale)
        ends = self.tail < 0, self.head < 0
        program.row(self.arcs[ends[0]], 1.0, 1.0, 1.0)
        program.row(self.arcs[ends[1]], 1.0, 1.0, 1.0)
        for node, room in enumerate(rooms.tolist()):
            count, visit = node, self.nodes + node
            for side in (self.tail, self.head):
                arcs = self.arcs[side == node]
                program.row(np.r_[arcs, visit], np.r_[np.ones(len(arcs)), -1.0], 0.0, 0.0)
            program.row([count, visit], [1.0, -float(room)], -np.inf, 0.0)
            program.row([count, visit], [1.0, -1.0], 0.0, np.inf)
        for run, length in enumerate(self.lengths):
            program.row(self.node(np.arange(self.devices), run), 1.0, length, length)
        for device in range(self.devices):
            self._hold(program, device)
            others = self.tail // len(self.lengths) != device  # -1 stays negative
            program.row(self.arcs[others & (self.head // len(self.lengths) == device)], 1.0, -np.inf, 1.0)
        return program

    def _hold(self, program: Program, device: int, share: float = 1.0) -> None:
        sizes, limit = self.costs.memory_row(device, self.begins[:-1])
        program.row(self.node(device, np.arange(len(self.lengths))), sizes, -np.inf, limit * share)

    def tighten(self, assignment: Assignment) -> None:
        """Bytes are rounded in HiGHS: a device over its capacity by a few is given less, enough to be noticed."""
        held = np.bincount(assignment, weights=self.costs.memory, minlength=self.devices)
        for device in np.flatnonzero(held > self.costs.capacity).tolist():
            self._hold(self.program, device, 1 - 1e-7)

    def cut_circles(self, values: Floats) -> bool:
        """Adds a row for every node on a circle: what is visited is entered from outside the circle."""
        found = False
        for circle in self._circles(values):
            found = True
            inside = np.isin(self.head, circle) & ~np.isin(self.tail, circle)
            for node in circle:
                into = self.arcs[inside]
                self.program.row(np.r_[into, self.nodes + node], np.r_[np.ones(len(into)), -1.0], 0.0, np.inf)
        return found

    def _circles(self, values: Floats) -> Iterator[list[int]]:
        onward = self._onward(values)
        on_path = set(self._path(onward))
        rest = set(onward) - on_path - {-1}
        while rest:
            circle = [rest.pop()]
            while (node := onward[circle[-1]]) != circle[0]:
                circle.append(node)
            rest -= set(circle)
            yield circle

    def _onward(self, values: Floats) -> dict[int, int]:
        used = np.flatnonzero(values[2 * self.nodes :])
        return {int(self.tail[arc]): int(self.head[arc]) for arc in used}

    @staticmethod
    def _path(onward: dict[int, int]) -> Iterator[int]:
        node = onward[-1]
        while node != -1:
            yield node
            node = onward[node]

    def assignment(self, values: Floats) -> Assignment:
        devices: list[int] = []
        for node in self._path(self._onward(values)):
            devices += [node // len(self.lengths)] * int(values[node])
        return tuple(devices)
