"""Chooses a type for every group of tensors, and a device for every part of the model, as an integer program.

Minimised is the sum of the groups' KL divergences, within bytes of the file, bytes of the accelerator and seconds per
token. Tensors of one part (attention or feed-forward of a layer, the output) share a device, and every change of device
from part to part costs: what the exact planner decides tensor by tensor for the types that are found here.

x[g, t]: group g has type t. home[p]: part p is on the accelerator. on[i, t]: tensor i has type t and is there, the
product of both. cut[p]: the device changes before part p.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ..solving.deadline import Deadline
from ..solving.highs import Program

Floats = NDArray[np.float64]
Bytes = NDArray[np.int64]
# Seconds are worth this share of the divergence of all groups in their worst types: of equal divergence, the faster.
_TIE = 1e-6
_NOTHING = 1e-12  # nats or seconds
_UNITS = 1e5  # HiGHS' tolerances are absolute: seconds are scaled to this much


@dataclass(frozen=True)
class Times:
    """Seconds and bytes of placeable tensors (axis 0) by type (axis 1); parts in execution order.

    group, part: of each tensor. host, device: seconds per generated token. nbytes: of a tensor in a type. cut: seconds
    of a change of device. Without an accelerator `device` is None and everything is on the host.
    """

    group: Sequence[int]
    part: Sequence[int]
    host: Floats
    device: Floats | None
    nbytes: Bytes
    cut: float = 0.0


@dataclass(frozen=True)
class Problem:
    """kld, nbytes: [groups, types] of a group alone in a type; kld is infinite where its rows are no whole blocks."""

    kld: Floats
    nbytes: Bytes
    times: Times | None = None


@dataclass(frozen=True)
class Limits:
    """What a choice may take at most: bytes of all groups, bytes on the accelerator, seconds per token."""

    nbytes: float = np.inf
    device_bytes: float = np.inf
    seconds: float = np.inf


@dataclass(frozen=True)
class TypeAssignment:
    """types: index by group. home: by part, whether on the accelerator. Sums as the problem has them."""

    types: NDArray[np.intp]
    home: NDArray[np.bool_]
    kld: float
    nbytes: int
    seconds: float
    device_bytes: int


def choose(
    problem: Problem, limits: Limits = Limits(), *, fastest: bool = False, time_limit_s: float = 20.0
) -> TypeAssignment | None:
    """The choice of least divergence within the limits (fastest: of fewest seconds); None when there is none."""
    return _Model(problem, limits, fastest).solve(time_limit_s)


def evaluate(problem: Problem, types: NDArray[np.intp], home: NDArray[np.bool_]) -> TypeAssignment:
    """The sums of a choice."""
    groups = np.arange(len(types))
    kld, nbytes = float(problem.kld[groups, types].sum()), int(problem.nbytes[groups, types].sum())
    seconds, device_bytes, times = 0.0, 0, problem.times
    if times is not None:
        tensors, its_type = np.arange(len(times.group)), types[np.asarray(times.group, np.intp)]
        each, there = times.host[tensors, its_type], np.zeros(len(tensors), bool)
        if times.device is not None:
            there = home[np.asarray(times.part, np.intp)]
            each = np.where(there, times.device[tensors, its_type], each)
        changes = np.abs(np.diff(np.r_[0, home.astype(int), 0])).sum()
        seconds = float(each.sum() + times.cut * changes)
        device_bytes = int(times.nbytes[tensors, its_type][there].sum())
    return TypeAssignment(types, home, kld, nbytes, seconds, device_bytes)


@dataclass
class _Model:
    problem: Problem
    limits: Limits
    fastest: bool
    x: NDArray[np.intp] = field(init=False)
    home: NDArray[np.intp] = field(init=False)

    def __post_init__(self) -> None:
        problem, times = self.problem, self.problem.times
        self.legal = np.isfinite(problem.kld)
        groups, types = problem.kld.shape
        self.placed = times is not None and times.device is not None
        parts = max(times.part) + 1 if times is not None and self.placed else 0
        tensors = len(times.group) if times is not None and self.placed else 0
        # Columns: x, home, on, cut.
        self.x = np.arange(groups * types).reshape(groups, types)
        self.home = groups * types + np.arange(parts)
        self.on = groups * types + parts + np.arange(tensors * types).reshape(tensors, types)
        self.cut = groups * types + parts + tensors * types + np.arange(parts + 1 if parts else 0)
        n = groups * types + parts + tensors * types + len(self.cut)
        upper = np.ones(n)
        upper[self.x[~self.legal]] = 0.0
        whole = np.zeros(n, bool)
        whole[self.x.ravel()] = whole[self.home] = True
        self.kld_cost = np.zeros(n)
        self.kld_cost[self.x[self.legal]] = problem.kld[self.legal]
        self.seconds_cost = self._seconds(n)
        worst = max(float(np.where(self.legal, problem.kld, 0).max(axis=1).sum()), _NOTHING)
        slowest = max(float(np.abs(self.seconds_cost).sum()), _NOTHING)
        cost = self.seconds_cost if self.fastest else self.kld_cost + self.seconds_cost * (_TIE * worst / slowest)
        self.program = Program(cost, upper, whole, slowest if self.fastest else worst)
        self._rows()

    def _seconds(self, n: int) -> Floats:
        cost, times = np.zeros(n), self.problem.times
        if times is None:
            return cost
        for i, group in enumerate(times.group):
            cost[self.x[group]] += np.where(self.legal[group], times.host[i], 0.0)
            if times.device is not None:
                cost[self.on[i]] = np.where(self.legal[group], times.device[i] - times.host[i], 0.0)
        cost[self.cut] = times.cut
        return cost

    def _rows(self) -> None:
        inf, program, times = np.inf, self.program, self.problem.times
        for columns in self.x:
            program.row(columns, 1.0, 1.0, 1.0)
        self._limit(self.x.ravel(), np.where(self.legal, self.problem.nbytes, 0).ravel(), self.limits.nbytes)
        used = np.flatnonzero(self.seconds_cost)
        self._limit(used, self.seconds_cost[used], self.limits.seconds)
        if times is None or not self.placed:
            return
        for i, (group, part) in enumerate(zip(times.group, times.part, strict=True)):
            program.row([*self.on[i], self.home[part]], [1.0] * len(self.on[i]) + [-1.0], 0.0, 0.0)
            for on, x in zip(self.on[i], self.x[group], strict=True):
                program.row([on, x], [1.0, -1.0], -inf, 0.0)
        # The embedding is read and the logits are wanted on the host: both ends count as cuts.
        for cut, before, after in zip(self.cut, [None, *self.home], [*self.home, None], strict=True):
            ends = [column for column in (before, after) if column is not None]
            for signs in ((1.0, -1.0), (-1.0, 1.0)):
                values = [sign for sign, column in zip(signs, (before, after), strict=True) if column is not None]
                program.row([*ends, cut], [*values, -1.0], -inf, 0.0)
        legal = self.legal[np.asarray(times.group, np.intp)]
        self._limit(self.on.ravel(), np.where(legal, times.nbytes, 0).ravel(), self.limits.device_bytes)

    def _limit(self, columns: NDArray[np.intp], values: NDArray, limit: float) -> None:
        if not np.isfinite(limit) or not len(columns):
            return
        if np.issubdtype(values.dtype, np.integer):
            # Sums are multiples of the divisor: half of one more makes rounding harmless, and the row tighter.
            unit = float(np.gcd.reduce(values)) or 1.0
            limit = (math.floor(limit / unit) + 0.5) * unit
        else:
            unit = max(abs(limit), 1e-300) / _UNITS
        self.program.row(columns, values / unit, -np.inf, limit / unit)

    def solve(self, time_limit_s: float) -> TypeAssignment | None:
        values = self.program.solve(Deadline(time_limit_s)).values
        if values is None:
            return None
        types = np.where(self.legal, values[self.x], -1.0).argmax(axis=1)
        return evaluate(self.problem, types, values[self.home] > 0.5)
