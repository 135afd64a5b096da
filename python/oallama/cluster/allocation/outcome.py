"""What a solver answers."""

from __future__ import annotations

from dataclasses import dataclass

from .costs import Assignment


@dataclass(frozen=True)
class Outcome:
    """assignment: the best known, None if there is none. bound: no allocation costs less (inf: none fits)."""

    assignment: Assignment | None
    bound: float
