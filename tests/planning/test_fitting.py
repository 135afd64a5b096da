"""Proposals and dry runs until one fits: `fit` with made-up ones."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from oallama.planning.fitting import MAX_ROUNDS, Proposal, fit


class Builder:
    """One accelerator. Beside what a proposal counts, it needs `more` bytes."""

    def __init__(self, limit: int, more: int) -> None:
        self.limits, self.more, self.dry_runs = [limit], more, 0

    def by_homes(self, homes: Any, affinity: Any) -> Any:
        return homes

    def dry_run(self, homes: Any) -> Any:
        self.dry_runs += 1
        return SimpleNamespace(total=homes + self.more, seconds=1000.0 - homes)

    def used(self, dry_run: Any) -> list[int]:
        return [dry_run.total]

    def excess(self, dry_run: Any) -> list[int]:
        return [dry_run.total - self.limits[0]]


@pytest.mark.parametrize("size", [1, 7, 100])
@pytest.mark.parametrize("guess", [0, 10, 49])
def test_what_was_not_counted_is_found_in_a_round(size: int, guess: int) -> None:
    """Also where the weights are so large that a little more charge would propose the same again."""
    builder, proposed = Builder(limit=345, more=50), []

    def choose(capacity: list[int]) -> Proposal | None:
        counted = capacity[0] // size * size
        proposed.append(counted)
        return Proposal(counted, [counted], {}) if counted >= 0 else None  # type: ignore[arg-type]

    found = fit(builder, choose, [guess], size)  # type: ignore[arg-type]
    assert found is not None and found.proposal.counted == [(345 - 50) // size * size]
    assert builder.dry_runs <= 2 < MAX_ROUNDS and len(set(proposed)) == len(proposed)


class ShareOfWeights(Builder):
    """Its budget counts weights alone, and is more than the device has."""

    physical = 300

    def used(self, dry_run: Any) -> list[int]:
        return [dry_run.total - self.more]

    def excess(self, dry_run: Any) -> list[int]:
        return [max(dry_run.total - self.more - self.limits[0], dry_run.total - self.physical)]


@pytest.mark.parametrize("size", [1, 7, 100])
def test_a_share_of_the_weights_that_the_device_has_no_room_for_gets_what_there_is(size: int) -> None:
    builder = ShareOfWeights(limit=345, more=50)

    def choose(capacity: list[int]) -> Proposal | None:
        counted = capacity[0] // size * size
        return Proposal(counted, [counted], {}) if counted >= 0 else None  # type: ignore[arg-type]

    found = fit(builder, choose, [0], size)  # type: ignore[arg-type]
    assert found is not None and found.proposal.counted == [(300 - 50) // size * size]
    assert builder.dry_runs <= MAX_ROUNDS
