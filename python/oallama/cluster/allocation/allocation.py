"""Which device computes which layer: the answer, and the front door to the solvers."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any, Literal, NamedTuple

import numpy as np

from ...data.budget import format_bytes
from ...errors import OallamaError
from .costs import Costs, make_costs
from .dynamic import solve_dynamic
from .grouped import solve_grouped
from .milp import solve_milp
from .outcome import Method, Outcome, Solved
from .problem import Problem
from .terms import Terms, price

Solver = Literal["grouped", "milp", "dynamic"]
_ROUNDING = 1e-6  # of a relative gap; solvers stop at 1e-7


class DoesNotFit(OallamaError):
    """The layers do not fit. missing_bytes: of all devices together, 0 where they suffice and yet nothing fits."""

    def __init__(self, message: str, missing_bytes: int) -> None:
        super().__init__(message)
        self.missing_bytes = missing_bytes


class LayerRange(NamedTuple):
    """A run of layers on a device: the half-open range [first, end)."""

    device: str
    first: int
    end: int


@dataclass(frozen=True)
class Allocation:
    """A device for every layer.

    layers: the device's name for every layer, in order. terms: what it costs, in seconds. bound_s: no allocation costs
    less (as far as the solver that made it looked: "dynamic" knows one order of devices). solver: as asked for. method:
    what it used. solve_s: seconds that it took.
    """

    problem: Problem
    layers: tuple[str, ...]
    terms: Terms
    bound_s: float
    solver: str
    method: Method
    solve_s: float

    @property
    def ranges(self) -> tuple[LayerRange, ...]:
        """What each device of the pipeline has, in order."""
        found, at = [], 0
        for device, same in groupby(self.layers):
            n = len(list(same))
            found.append(LayerRange(device, at, at + n))
            at += n
        return tuple(found)

    @property
    def gap(self) -> float:
        """How far the cost may be above the optimum's, relative; 0: it is proven, infinite: nothing is known."""
        return max(0.0, self.terms.total_s / self.bound_s - 1) if self.bound_s > 0 else math.inf

    @property
    def solved(self) -> Solved:
        """How it was found."""
        gap = None if math.isinf(self.gap) else 0.0 if self.gap <= _ROUNDING else self.gap
        return Solved(self.solver, self.method, self.solve_s, gap, gap == 0 and self.solver != "dynamic")

    def held_bytes(self, device: str) -> int:
        """Bytes of the layers on a device."""
        return sum(
            layer.memory_bytes for layer, at in zip(self.problem.layers, self.layers, strict=True) if at == device
        )

    def to_dict(self) -> dict[str, Any]:
        """For JSON: ranges of layers with their bytes, the terms in seconds, the bound."""
        return {
            "links": self.problem.links,
            "segments": [
                {**s._asdict(), "layers": s.end - s.first, "memory_bytes": self.held_bytes(s.device)}
                for s in self.ranges
            ],
            "terms": self.terms.to_dict(),
            "bound_s": self.bound_s,
            "solved": asdict(self.solved),
        }


def allocate(
    problem: Problem,
    solver: Solver = "grouped",
    *,
    order: Sequence[str] | None = None,
    contiguous: bool = True,
    time_limit_s: float = 60.0,
) -> Allocation:
    """The allocation with the smallest objective (docs/sources.md, 5).

    Args:
        solver: "grouped" (default; fast), "milp" (the reference, small problems) or "dynamic" (the best for one order).
        order: for "dynamic": device names in the order the data may take; default: as in problem.devices.
        contiguous: for "milp": whether a device's layers are consecutive, as llama.cpp's pipelines have it.

    Raises:
        DoesNotFit: when the layers do not fit; the message says by how many bytes.
        OallamaError: when a link is missing, or nothing was found within `time_limit_s`.

    >>> allocate(problem).ranges
    (LayerRange(device='a', first=0, end=20), LayerRange(device='b', first=20, end=32))
    """
    began = time.monotonic()
    costs = make_costs(problem)
    check_room(problem, costs)
    if solver == "dynamic":
        names = [device.name for device in problem.devices]
        outcome = solve_dynamic(costs, [names.index(problem.device(name).name) for name in order or names])
    elif solver == "milp":
        outcome = solve_milp(costs, contiguous=contiguous, time_limit_s=time_limit_s)
    elif solver == "grouped":
        outcome = solve_grouped(costs, time_limit_s=time_limit_s)
    else:
        raise OallamaError(f"solver is {solver!r}, expected grouped, milp or dynamic")
    return finish(problem, costs, outcome, solver, began)


def finish(problem: Problem, costs: Costs, outcome: Outcome, solver: str, began: float) -> Allocation:
    """The allocation of a solver's answer; raises as `allocate` does when there is none.

    began: of time.monotonic(), when the solver was asked.
    """
    if outcome.assignment is None:
        if outcome.bound < np.inf:
            raise OallamaError(f"solver {solver} found no allocation in time; expected one, raise its time limit")
        raise DoesNotFit(_no_packing(problem, costs), 0)
    layers = tuple(problem.devices[i].name for i in outcome.assignment)
    terms = price(problem, layers)
    constant = terms.total_s - costs.total(outcome.assignment)
    bound = max(0.0, outcome.bound + constant)  # no cost is less than nothing
    return Allocation(problem, layers, terms, bound, solver, outcome.method, time.monotonic() - began)


def check_room(problem: Problem, costs: Costs) -> None:
    """Raises DoesNotFit when all devices together are too small, by bytes or (equal layers) by whole layers, or the one
    that must have the first layer is too small for it.
    """
    need, offer = int(costs.memory.sum()), int(costs.capacity.sum())
    what = f"the model's {len(costs.memory)} layers need {need} bytes ({format_bytes(need)})"
    room = (
        f"the devices {', '.join(d.name for d in problem.devices)} together offer {offer} bytes ({format_bytes(offer)})"
    )
    share = f" (beta {problem.settings.beta:g} of their memory)"
    remedy = "; add a device or memory, or take a smaller model, quantisation or context"
    if need > offer:
        missing = need - offer
        message = f"{what}; {room}{share}: {missing} bytes ({format_bytes(missing)}) too few{remedy}"
        raise DoesNotFit(message, missing)
    size = int(costs.memory[0])
    if costs.first is not None and (lack := size - int(costs.capacity[costs.first])) > 0:
        name = problem.settings.first_layer
        raise DoesNotFit(
            f"the first layer must be on {name} (first_layer) and needs {size} bytes ({format_bytes(size)}), {name} "
            f"offers {size - lack}{share}: {lack} bytes too few; raise its memory, or pin the layer to another device",
            lack,
        )
    if size and (costs.memory == size).all():
        whole = costs.capacity // size
        if (absent := len(costs.memory) - int(whole.sum())) > 0:
            # The devices with the largest remainders need the least to hold one layer more.
            lacks = np.sort(size - costs.capacity % size)
            missing = int(lacks[:absent].sum()) + max(0, absent - len(lacks)) * size
            message = (
                f"{what}; {room}{share}, room for {int(whole.sum())} whole layers: {missing} bytes too few{remedy}"
            )
            raise DoesNotFit(message, missing)


def _no_packing(problem: Problem, costs: Costs) -> str:
    spare = int(costs.capacity.sum() - costs.memory.sum())
    largest, room = int(costs.memory.max()), int(costs.capacity.max())
    if largest > room:
        return (
            f"the largest layer needs {largest} bytes, the largest device offers {room}: {largest - room} bytes too few"
        )
    names = ", ".join(device.name for device in problem.devices)
    pinned = f" with the first one on {problem.settings.first_layer}" if costs.first is not None else ""
    return (
        f"the devices offer {spare} bytes ({format_bytes(spare)}) more than the {len(costs.memory)} layers need, but "
        f"no division into whole layers{pinned} fits them; raise the memory of one of {names}"
    )
