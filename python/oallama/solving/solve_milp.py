"""The placement problem as an integer program for HiGHS: runs of equal layers are counted, not told apart.

w[run, way] is the number of layers of the run that use the way, y[b, state] whether boundary b between runs is crossed
in the state. A run's ways must form a walk from its first state to its last: flow conservation makes them balanced, and
cuts, added when violated, make them connected. Hierholzer's algorithm reads the walk back.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from .deadline import Deadline
from .highs import Program
from .layered import Bytes, Floats
from .trellis import Path, Trellis, Ways

# Capacities are scaled to this much, unless they are smaller in units of the bytes' common divisor: HiGHS' tolerances
# are absolute.
_UNITS = 1e5


@dataclass(frozen=True)
class Outcome:
    """path: the best known, if any. bound: no path of the trellis that fits takes fewer seconds (inf: none fits)."""

    path: Path | None
    bound: float


@dataclass(frozen=True)
class Run:
    """Equal layers in a row. first: column of the first of the ways. boundary: of the first state before the run."""

    ways: Ways
    which: int
    length: int
    first: int
    boundary: int


def solve_milp(trellis: Trellis, incumbent: Path | None, *, gap: float, deadline: Deadline) -> Outcome:
    """The optimum to `gap` (relative), or the best and its bound at `deadline`."""
    program = _Walks(trellis, gap)
    best, bound, tightened = incumbent, -np.inf, False
    if incumbent is not None:
        program.suggest(incumbent)
    while True:
        solution = program.model.solve(deadline)
        if not tightened:
            bound = max(bound, solution.bound)
        if solution.values is None:
            return Outcome(best, bound)
        values = np.rint(solution.values)
        cuts = list(program.disconnected(values))
        program.add(cuts)
        if not cuts:
            path = trellis.path(program.walk(values))
            excess = path.nbytes - trellis.capacity
            if (excess <= 0).all():
                return Outcome(path if best is None or path.seconds < best.seconds else best, bound)
            # Within HiGHS' tolerance of the capacity, but over it. What follows no longer bounds the instance itself.
            program.tighten(excess)
            tightened = True


class _Walks:
    """The walks through a trellis as a program, and back."""

    def __init__(self, trellis: Trellis, gap: float) -> None:
        self.trellis = trellis
        self.runs: list[Run] = []
        self.model = self._columns(gap / (1 + gap) * (1 - 1e-9))  # HiGHS relates it to the path, we to the bound
        self._flow()
        self._capacities()

    def _columns(self, gap: float) -> Program:
        trellis, states = self.trellis, self.trellis.states
        fastest = trellis.potentials(np.zeros(len(trellis.capacity))).value
        at = 0
        costs, uppers = [], []
        for which, layers in groupby(trellis.layers):
            ways, length = trellis.classes[which], len(list(layers))
            self.runs.append(Run(ways, which, length, at + states, at))
            allowed = np.ones(states)
            if at == 0:
                allowed = np.isin(np.arange(states), trellis.start).astype(float)
            costs += [np.zeros(states), ways.seconds]
            uppers += [allowed, np.full(len(ways.seconds), float(length))]
            at += states + len(ways.seconds)
        self.end = at
        cost, upper = np.concatenate([*costs, np.zeros(states)]), np.concatenate([*uppers, np.ones(states)])
        return Program(cost, upper, np.ones(len(cost), bool), fastest, gap)

    def _boundary_after(self, run: int) -> int:
        return self.runs[run + 1].boundary if run + 1 < len(self.runs) else self.end

    def _flow(self) -> None:
        """Entered as often as left, in every state of every run; as many ways as layers; one state at the start."""
        states = self.trellis.states
        for at, run in enumerate(self.runs):
            columns = run.first + np.arange(len(run.ways.seconds))
            for state in range(states):
                net = (run.ways.leave == state).astype(float) - (run.ways.enter == state)
                some = np.flatnonzero(net)
                ends = [run.boundary + state, self._boundary_after(at) + state]
                self.model.row(np.r_[columns[some], ends], np.r_[net[some], 1.0, -1.0], 0.0, 0.0)
            self.model.row(columns, np.ones(len(columns)), run.length, run.length)
        self.model.row(np.arange(states), np.ones(states), 1.0, 1.0)

    def _capacities(self) -> None:
        trellis = self.trellis
        self.rows: list[int] = []
        self.units: list[float] = []
        self.limits = trellis.capacity.copy()
        for k, capacity in enumerate(trellis.capacity.tolist()):
            divisor = math.gcd(*(int(np.gcd.reduce(one.nbytes[:, k])) for one in trellis.classes)) or 1
            unit = max(float(divisor), capacity / _UNITS)
            columns, values = [], []
            for run in self.runs:
                some = np.flatnonzero(run.ways.nbytes[:, k])
                columns.append(run.first + some)
                values.append(run.ways.nbytes[some, k] / unit)
            # Whole divisors only: what the capacity leaves over cannot be filled, and the row becomes tighter.
            limit = capacity // divisor * divisor / unit
            self.rows.append(self.model.row(np.concatenate(columns), np.concatenate(values), -np.inf, limit))
            self.units.append(unit)

    def suggest(self, path: Path) -> None:
        """Gives HiGHS a path to begin with; ways that the trellis no longer has make it no start, which is harmless."""
        values = np.zeros(self.end + self.trellis.states)
        layer = 0
        for run in self.runs:
            for _ in range(run.length):
                way = np.flatnonzero(run.ways.index == path.ways[layer])
                if not len(way):
                    return
                if values[run.boundary : run.boundary + self.trellis.states].sum() == 0:
                    values[run.boundary + run.ways.enter[way[0]]] = 1
                values[run.first + way[0]] += 1
                leave = run.ways.leave[way[0]]
                layer += 1
        values[self.end + leave] = 1
        self.model.start(values)

    def disconnected(self, values: Floats) -> Iterator[tuple[int, set[int]]]:
        """(run, states) for every part of a run's ways that its first state does not lead to."""
        for at, run in enumerate(self.runs):
            edges = self._edges(run, values)
            reached = {self._state_at(run.boundary, values)}
            rest = {state for enter, leave, _ in edges for state in (enter, leave)}
            reached |= _component(reached, edges)
            rest -= reached
            while rest:
                part = _component({min(rest)}, edges)
                rest -= part
                yield at, part

    def add(self, cuts: list[tuple[int, set[int]]]) -> None:
        """A part that is used must be entered: ways inside <= length * (ways into it + its states at the boundary)."""
        for at, part in cuts:
            run = self.runs[at]
            inside = np.isin(run.ways.enter, list(part)), np.isin(run.ways.leave, list(part))
            values = (inside[0] & inside[1]).astype(float) - run.length * (~inside[0] & inside[1])
            some = np.flatnonzero(values)
            columns = np.r_[run.first + some, [run.boundary + state for state in sorted(part)]]
            self.model.row(columns, np.r_[values[some], np.full(len(part), -float(run.length))], -np.inf, 0.0)

    def tighten(self, excess: Bytes) -> None:
        """Lowers the capacities that a solution exceeded (by rounding) by as much again."""
        for k in np.flatnonzero(excess > 0):
            self.limits[k] -= 2 * excess[k]
            self.model.limit(self.rows[k], self.limits[k] / self.units[k])

    def walk(self, values: Floats) -> list[int]:
        """The ways of all layers in an order in which each enters the state that the one before leaves (Hierholzer)."""
        ways: list[int] = []
        for run in self.runs:
            out: dict[int, list[tuple[int, int]]] = {}
            for enter, leave, way in self._edges(run, values):
                out.setdefault(enter, []).extend([(leave, way)] * int(values[run.first + way]))
            stack, order = [(self._state_at(run.boundary, values), -1)], []
            while stack:
                onward = out.get(stack[-1][0])
                if onward:
                    stack.append(onward.pop())
                else:
                    order.append(stack.pop()[1])
            ways += order[-2::-1]  # from the end back, less the start that no way led to
        return ways

    def _edges(self, run: Run, values: Floats) -> list[tuple[int, int, int]]:
        used = np.flatnonzero(values[run.first : run.first + len(run.ways.seconds)])
        return [(int(run.ways.enter[way]), int(run.ways.leave[way]), int(way)) for way in used]

    def _state_at(self, boundary: int, values: Floats) -> int:
        return int(np.argmax(values[boundary : boundary + self.trellis.states]))


def _component(states: set[int], edges: list[tuple[int, int, int]]) -> set[int]:
    """The states that `edges`, in either direction, lead to from `states`."""
    reached = set(states)
    while True:
        more = {b for a, b, _ in edges if a in reached} | {a for a, b, _ in edges if b in reached}
        if more <= reached:
            return reached
        reached |= more
