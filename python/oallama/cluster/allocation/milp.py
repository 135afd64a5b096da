"""The reference: one binary for every device and layer, as the patent writes it (docs/sources.md, 5).

x[i, j] puts layer j on device i; y[j, i, k] says that the data goes from i to k after layer j, the product of two x's,
linear because its sums over i and over k are x's. Small instances only: it has layers * devices^2 columns.

The patent does not demand that a device's layers are consecutive. llama.cpp's pipelines have it so (-ts), and it is the
default; every further visit to a device is otherwise paid like the first.
"""

from __future__ import annotations

import numpy as np

from ...solving.deadline import Deadline
from ...solving.highs import Program
from .costs import Assignment, Costs, Floats
from .outcome import Outcome


def solve_milp(costs: Costs, *, contiguous: bool = True, time_limit_s: float = 60.0) -> Outcome:
    """The optimum, or the best within `time_limit_s`. contiguous: a device holds one run of consecutive layers."""
    deadline = Deadline(time_limit_s)
    program = _program(costs, contiguous)
    while True:
        solution = program.solve(deadline)
        if solution.values is None:
            return Outcome(None, solution.bound, "MILP")
        assignment = _assignment(costs, solution.values)
        if costs.fits(assignment):
            return Outcome(assignment, solution.bound, "MILP")
        _forbid(program, costs, assignment)


def _program(costs: Costs, contiguous: bool) -> Program:
    devices, layers = costs.compute.shape
    x, y = _columns(costs)
    crossing = costs.boundary[1:-1].ravel()
    first, last = costs.boundary[0, 0, :], costs.boundary[-1, :, 0]
    place = costs.compute.copy()
    place[:, 0] += first
    place[:, -1] += last
    allowed = (costs.memory[None, :] <= costs.capacity[:, None]).astype(float)
    allowed[:, 0] *= costs.may_begin(np.arange(devices))
    program = Program(
        cost=np.r_[place.ravel(), crossing],
        upper=np.r_[allowed.ravel(), np.ones(len(crossing))],
        whole=np.r_[np.ones(place.size, bool), np.zeros(len(crossing), bool)],
        scale=float(place.min(axis=0).sum()),
    )
    for j in range(layers):
        program.row(x[:, j], 1.0, 1.0, 1.0)
    for i in range(devices):
        sizes, limit = costs.memory_row(i, slice(None))
        program.row(x[i], sizes, -np.inf, limit)
    one = np.r_[np.ones(devices), -1.0]
    for j in range(layers - 1):
        for i in range(devices):
            program.row(np.r_[y[j, i, :], x[i, j]], one, 0.0, 0.0)
            program.row(np.r_[y[j, :, i], x[i, j + 1]], one, 0.0, 0.0)
    if contiguous:
        for k in range(devices):
            entries = np.delete(y[:, :, k], k, axis=1).ravel()
            program.row(np.r_[x[k, 0], entries], 1.0, -np.inf, 1.0)
    return program


def _columns(costs: Costs) -> tuple[np.ndarray, np.ndarray]:
    """Column numbers of x [D, L] and y [L - 1, D, D]."""
    devices, layers = costs.compute.shape
    x = np.arange(devices * layers).reshape(devices, layers)
    y = x.size + np.arange((layers - 1) * devices**2).reshape(layers - 1, devices, devices)
    return x, y


def _assignment(costs: Costs, values: Floats) -> Assignment:
    x = values[: costs.compute.size].reshape(costs.compute.shape)
    return tuple(int(i) for i in x.argmax(axis=0))


def _forbid(program: Program, costs: Costs, assignment: Assignment) -> None:
    """Bytes are rounded in HiGHS: a device may be over its capacity by a few. What it holds is one layer too many."""
    x, _ = _columns(costs)
    for i in range(len(costs.capacity)):
        held = np.flatnonzero(np.array(assignment) == i)
        if costs.memory[held].sum() > costs.capacity[i]:
            program.row(x[i, held], 1.0, -np.inf, len(held) - 1.0)
