"""Fits a planner's proposal into the budget: compute buffers depend on the plan, so plan, dry-run, correct, repeat."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from .plan_builder import DryRunPlan, PlanBuilder
from .stage import Homes

MAX_ROUNDS = 4


@dataclass(frozen=True)
class Proposal:
    """What a planner proposes for a capacity: counted are the bytes per accelerator that it knew of."""

    homes: Homes
    counted: Sequence[int]
    params: Mapping[str, object]
    affinity: Sequence[float] | None = None


@dataclass(frozen=True)
class Fitted:
    """A proposal within the budget, with its dry run."""

    proposal: Proposal
    dry_run: DryRunPlan


def fit(
    builder: PlanBuilder, choose: Callable[[list[int]], Proposal | None], charge: Sequence[int], smallest: int
) -> Fitted | None:
    """The fastest proposal within the budgets that MAX_ROUNDS dry runs find; None when none of them fits.

    choose: a proposal for these bytes per accelerator, None when there is none. charge: bytes per accelerator that the
    proposal does not count (compute buffers and the like), a first guess: a result over the budget raises it to what
    that needed, so that the next proposal is another; one that needed less gives the room back if it may hold the
    smallest weight.
    """
    charges, best, overran = [*charge], None, None
    for _ in range(MAX_ROUNDS):
        proposal = choose([limit - c for limit, c in zip(builder.limits, charges, strict=True)])
        if proposal is None:
            if best is not None or overran is None:
                break
            # Raised by too much: what chooses less needs smaller buffers.
            charges = [(low + high) // 2 for low, high in zip(overran, charges, strict=True)]
            continue
        dry_run = builder.dry_run(builder.by_homes(proposal.homes, proposal.affinity))
        over = builder.excess(dry_run)
        # A share of the weights counts no buffers: there the device's own memory may be what is exceeded.
        needed = [
            max(u - k, c + o) for u, k, c, o in zip(builder.used(dry_run), proposal.counted, charges, over, strict=True)
        ]
        if any(o > 0 for o in over):
            if best is not None:
                break
            overran, charges = charges, [n if o > 0 else c for c, n, o in zip(charges, needed, over, strict=True)]
            continue
        if best is None or dry_run.seconds < best.dry_run.seconds:
            best = Fitted(proposal, dry_run)
        if all(c - n < smallest for c, n in zip(charges, needed, strict=True)):
            break
        charges = needed
    return best
