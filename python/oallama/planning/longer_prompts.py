"""What a plan does for prompts that are longer than its workload's: it streams more weights, if their slots fit.

Slots are device memory that the workload has no use for. Where the plan fills the budget, weights give way to them, as
long as the request takes hardly longer.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from .divided import bytes_of
from .fitting import Fitted
from .plan_builder import HIDES, DryRunPlan, PlanBuilder
from .space import Space
from .stage import STREAMER, Homes
from .streams import for_longer_prompts

# For slots a request may take longer by this share, and a full micro-batch must gain that much.
_COST, _GAIN = 0.03, 0.10
_MOST_TRIED = 64  # ways of giving way


def prepared(space: Space, builder: PlanBuilder, fitted: Fitted) -> tuple[DryRunPlan, dict[str, Any]]:
    """The plan with weights streamed for longer prompts, and what its parameters then say; else as it was."""
    costs, homes = builder.costs, fitted.proposal.homes
    hides = costs.overlap >= HIDES or not costs.uploader
    may_stream = space.streams and hides and builder.accelerators and not space.paper and not homes.upload.any()
    beside = _streamed(builder, fitted, homes) if may_stream else None
    if beside is None:
        return fitted.dry_run, {}
    more, dry_run = beside
    if not builder.fits(dry_run):
        return _in_place_of_weights(builder, fitted, max(builder.excess(dry_run))) or (fitted.dry_run, {})
    if dry_run.seconds > fitted.dry_run.seconds * (1 + 1e-9):
        return fitted.dry_run, {}
    return dry_run, _said(more, homes)


def _in_place_of_weights(builder: PlanBuilder, fitted: Fitted, nbytes: int) -> tuple[DryRunPlan, dict[str, Any]] | None:
    """As `prepared`, with so many bytes of weights less on the accelerator; None where that is not worth it."""
    homes, before, predictor = fitted.proposal.homes, fitted.dry_run, builder.predictor
    smaller = _giving_way(builder, homes, nbytes)
    instead = _streamed(builder, fitted, smaller) if smaller else None
    if instead is None:
        return None
    more, dry_run = instead
    full = builder.costs.context.n_ubatch
    gains = predictor.ttft(more, full) <= (1 - _GAIN) * predictor.ttft(homes, full)
    if not builder.fits(dry_run) or dry_run.seconds > before.seconds * (1 + _COST) or not gains:
        return None
    name, params = builder.accelerators[STREAMER - 1], fitted.proposal.params
    said: dict[str, Any] = {
        **_said(more, homes),
        "gave_way": before.on(name).weights - dry_run.on(name).weights,
    }
    if "gap" in params:  # to the bound of plans without slots
        gap = 1 - float(params["bound_s"]) / dry_run.seconds  # type: ignore[arg-type]
        said |= {"gap": gap, "status": "room for slots"}
    return dry_run, said


def _streamed(builder: PlanBuilder, fitted: Fitted, homes: Homes) -> tuple[Homes, DryRunPlan] | None:
    """None where no longer prompt gains by streams."""
    more = for_longer_prompts(builder.predictor, homes, builder.workload)
    if more is homes or more.stream is None:
        return None
    return more, builder.dry_run(builder.by_homes(more, fitted.proposal.affinity))


def _said(more: Homes, homes: Homes) -> dict[str, int]:
    assert more.stream is not None
    before = 0 if homes.stream is None else homes.stream
    return {"streams_later": int(more.stream[more.stream != before].min())}


def _giving_way(builder: PlanBuilder, homes: Homes, nbytes: int) -> Homes | None:
    """The homes with so many bytes of weights less on the accelerator, where the request misses them least.

    Neighbours give way together: every place where the device changes costs time. None where there is too little.
    """
    parts = _parts(builder, homes)
    ends = np.cumsum([part_bytes for _, part_bytes in parts])
    ways = []
    for first in range(len(parts)):
        last = int(np.searchsorted(ends, nbytes + (ends[first - 1] if first else 0)))
        if last == len(parts):
            break
        ways.append(_without(homes, [target for part, _ in parts[first : last + 1] for target in part]))
    if not ways:
        return None
    tried = [ways[i] for i in np.unique(np.linspace(0, len(ways) - 1, _MOST_TRIED).astype(int))]
    return tried[int(np.argmin(builder.predictor.requests(tried, builder.workload)))]


def _parts(builder: PlanBuilder, homes: Homes) -> list[tuple[tuple[int, ...], int]]:
    """What the accelerator has, in the model's order: targets that only leave it together, and their bytes there."""
    parts: list[tuple[tuple[int, ...], int]] = []
    parts += [((int(i),), int(builder.costs.nbytes[i])) for i in np.flatnonzero(homes.targets == STREAMER)]
    if homes.split is not None:
        groups = builder.predictor.tables(homes.division).groups
        counts = [(group, int(homes.split[group.targets[0]])) for group in groups]
        parts += [(group.targets, bytes_of(group, count)) for group, count in counts if count]
    return sorted(parts)


def _without(homes: Homes, targets: list[int]) -> Homes:
    """The homes with these targets on the host as a whole."""
    there = homes.targets.copy()
    there[targets] = 0
    if homes.split is None:
        return replace(homes, targets=there)
    split = homes.split.copy()
    split[targets] = 0
    return replace(homes, targets=there, split=split)
