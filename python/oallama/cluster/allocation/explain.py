"""Why an allocation is as it is: its terms, what it costs without each of its devices, and without the QoS terms."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from .allocation import Allocation, DoesNotFit, allocate
from .problem import Problem
from .terms import price


@dataclass(frozen=True)
class Explanation:
    """An allocation beside its alternatives.

    without: the best allocation that leaves out a device the chosen one uses; None where the layers then do not fit.
    time_only: the best for wq1 = wq2 = wq3 = 0, which ignores jitter and loss; it is priced with the weights as given.
    """

    chosen: Allocation
    without: Mapping[str, Allocation | None]
    time_only: Allocation

    @property
    def runner_up(self) -> Allocation | None:
        """The cheapest allocation that leaves out one of the devices used; None when every one is needed."""
        found = [other for other in self.without.values() if other is not None]
        return min(found, key=lambda other: other.terms.total_s, default=None)

    @property
    def moved_by_qos(self) -> int:
        """Layers that are elsewhere because of jitter and loss."""
        return sum(a != b for a, b in zip(self.chosen.layers, self.time_only.layers, strict=True))

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        runner_up = self.runner_up
        return {
            "chosen": self.chosen.to_dict(),
            "without": {name: None if other is None else other.terms.total_s for name, other in self.without.items()},
            "runner_up": None if runner_up is None else runner_up.to_dict(),
            "time_only": self.time_only.to_dict(),
            "moved_by_qos": self.moved_by_qos,
        }


def explain(chosen: Allocation, *, time_limit_s: float = 60.0) -> Explanation:
    """Solves the problem again without each device used, and without QoS weights; `time_limit_s` for each."""
    problem = chosen.problem
    without: dict[str, Allocation | None] = {}
    for name in dict.fromkeys(chosen.layers):
        try:
            other = allocate(_leave_out(problem, name), time_limit_s=time_limit_s)
            without[name] = replace(other, problem=problem)
        except DoesNotFit:
            without[name] = None
    blind = replace(problem, settings=replace(problem.settings, wq1=0.0, wq2=0.0, wq3=0.0))
    other = allocate(blind, time_limit_s=time_limit_s)
    time_only = replace(other, problem=problem, terms=price(problem, other.layers))
    return Explanation(chosen, without, time_only)


def _leave_out(problem: Problem, name: str) -> Problem:
    """Without layers on a device, which stays: the client has embedding and head, another may be first_layer."""
    devices = (replace(device, memory_bytes=0) if device.name == name else device for device in problem.devices)
    return replace(problem, devices=tuple(devices))
