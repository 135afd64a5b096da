"""The planner of divided weights: feed-forwards, and the output matrix, computed by accelerator and host at once.

The bytes that whole matrices would take are shared out anew. With t(x) the seconds of a group with x bytes on the
accelerator, t falls by the host's seconds per byte until both sides take equally long, and rises from there to that of
a group that is there as a whole, which has nothing to hide: so either all groups have one share, or some are whole and
the others have one (`_arrangements`; the prediction chooses). Everything else is as in the plan it starts from, the
exact planner's, or one with attention and all small weights on the accelerator.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..errors import OallamaError
from .divided import DividedCosts, Group, bytes_of, fill
from .drafts import Drafts
from .exact import Moves, moves_to_try
from .fitting import Choice, Fitted, fit
from .space import Space
from .stage import STREAMER, Placement
from .streams import not_too_early, with_streams

# Shares of the groups that may be whole on the accelerator beside divided ones.
_WHOLE = (0.0, 0.25, 0.5, 0.75)


def divided(space: Space, drafts: Drafts, start: Fitted) -> tuple[Drafts, Fitted]:
    """The best plan with divided weights on one accelerator, in the context of the exact planner's `start`.

    Raises OallamaError when the model has no weights that may be divided, or nothing fits.
    """
    tables = DividedCosts(drafts.costs)
    if not tables.groups:
        raise OallamaError("this model has no weights that can be divided between an accelerator and the host")
    found = []
    for moves in moves_to_try(space, drafts.costs):
        for base in _bases(drafts, start, tables.groups):
            fitted = _Dividing(space, drafts, tables, moves, base).fit(start)
            if fitted is not None:
                found.append(fitted)
    if not found:
        raise OallamaError("nothing is left to divide: KV cache, attention and buffers fill the budget")
    return drafts, min(found, key=lambda f: f.measured.seconds)


def _bases(drafts: Drafts, start: Fitted, groups: Sequence[Group]) -> list[Placement]:
    """Placements of everything that is not divided."""
    inside = sorted({t for group in groups for t in group.targets})
    outside = np.ones(len(drafts.costs.targets), dtype=np.int8)
    outside[inside] = 0
    return [start.choice.placement, drafts.uniform(STREAMER, outside)]


@dataclass(frozen=True)
class _Dividing:
    """The choice for one placement of the rest and one kind of moves."""

    space: Space
    drafts: Drafts
    tables: DividedCosts
    moves: Moves
    base: Placement

    def fit(self, start: Fitted) -> Fitted | None:
        drafts = self.drafts
        there = int(drafts.costs.nbytes[start.choice.placement.targets == STREAMER].sum())
        charge = drafts.used(start.measured)[0] - there
        found = fit(drafts, self._choose, [charge], min(bytes_of(g, g.step) for g in self.tables.groups))
        if found is None or not self.moves.streams:
            return found
        placement = not_too_early(drafts.predictor, found.choice.placement, self.space.workload)
        measured = replace(found.measured, plan=drafts.by_placement(placement))
        return replace(found, choice=replace(found.choice, placement=placement), measured=measured)

    def _choose(self, capacity: list[int]) -> Choice | None:
        costs, workload, predictor = self.drafts.costs, self.space.workload, self.drafts.predictor
        fixed = self._bytes_outside()
        free = capacity[0] - fixed
        if free < 0:
            return None
        tried = [self._placed(counts) for counts in self._arrangements(free)]
        best = min(tried, key=lambda placement: predictor.request(placement, workload))
        assert best.split is not None
        taken = sum(
            bytes_of(group, group.width if best.targets[group.targets[0]] else int(best.split[group.targets[0]]))
            for group in self.tables.groups
        )
        shares = sorted({round(int(best.split[g.targets[0]]) / g.width, 3) for g in self.tables.groups})
        params = {
            "uploads": bool(best.upload.any()),
            "streams": best.stream is not None and bool(best.stream.any()),
            "shares": [share for share in shares if share],
            "concurrency": costs.profile.concurrent(costs.names[STREAMER]),
        }
        return Choice(best, [fixed + taken], params)

    def _bytes_outside(self) -> int:
        """Bytes of the other targets on the accelerator."""
        costs = self.drafts.costs
        inside = {t for group in self.tables.groups for t in group.targets}
        return sum(
            int(costs.nbytes[t]) for t in range(len(costs.targets)) if t not in inside and self.base.targets[t] > 0
        )

    def _arrangements(self, free: int) -> Iterator[list[int]]:
        """Values on the accelerator per group."""
        groups = self.tables.groups
        nothing = [0] * len(groups)
        yield nothing
        for whole in _WHOLE:
            n = int(whole * len(groups))
            left = free - sum(group.nbytes for group in groups[:n])
            if left <= 0:
                break
            for share in (1.0, *self._balanced()):
                yield [group.width for group in groups[:n]] + fill(groups[n:], left, share)

    def _balanced(self) -> tuple[float, ...]:
        """The share at which both sides take equally long in decode."""
        at = self.drafts.costs.stage(self.space.workload.n_parallel, decode=True)
        inside = np.isin(at.graph.target, [t for group in self.tables.groups for t in group.targets])
        host, device = float(at.seconds[0, inside].sum()), float(at.seconds[STREAMER, inside].sum())
        return (host / (host + device),) if host + device > 0 else ()

    def _placed(self, counts: Sequence[int]) -> Placement:
        """The base with `counts` values of each group on the accelerator; full groups are whole there."""
        targets, split = self.base.targets.copy(), np.zeros(len(self.base.targets), dtype=np.intp)
        for group, count in zip(self.tables.groups, counts, strict=True):
            targets[list(group.targets)] = STREAMER if count == group.width else 0
            split[list(group.targets)] = 0 if count == group.width else count
        moved = self.moves.mask & (targets == 0)
        placement = replace(self.base, targets=targets, split=split, stream=None, upload=np.zeros_like(moved))
        if not self.moves.streams:
            return replace(placement, upload=moved)
        return with_streams(self.drafts.predictor, placement, self.moves.mask, self.space.workload)
