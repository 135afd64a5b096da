"""What a solver answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from .costs import Assignment

# dynamic programming: exact in itself, or its answer was proven by a bound. grouped MILP: of counts or pieces of layers
# in place of single ones. MILP: a binary for every layer and device.
Method = Literal["dynamic programming", "grouped MILP", "MILP"]


@dataclass(frozen=True)
class Outcome:
    """assignment: the best known, None if there is none. bound: no allocation costs less (inf: none fits).

    method: what found it.
    """

    assignment: Assignment | None
    bound: float
    method: Method


@dataclass(frozen=True)
class Solved:
    """How an allocation was found.

    Attributes:
        solver: the one that was asked for: "grouped", "milp", "dynamic" or "replan".
        method: what it used for this problem.
        seconds: that it took.
        gap: how far the cost may be above the optimum's, relative; 0: no more than rounding, None: nothing is known.
            For "dynamic" the optimum is that of one order of the devices.
        is_proven: whether no allocation costs less.
    """

    solver: str
    method: Method
    seconds: float
    gap: float | None
    is_proven: bool

    @classmethod
    def from_dict(cls, content: dict[str, Any] | None) -> Solved | None:
        """From its fields as JSON. Raises TypeError for anything else."""
        return None if content is None else cls(**content)
