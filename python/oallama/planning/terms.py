"""Where a plan's seconds go by device and kind of work: what a run can be held against.

A prediction is linear in the times of each kind of work on each device, but for streams that hide behind others. So a
term is what the prediction grows by when the times of that kind grow, which needs no second cost model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ..data.entries import CHANGES, KINDS, TRANSFERS
from ..data.plan import HOST, PlacementPlan
from .space import Space

_STEP = 0.01


def terms_of(space: Space, plan: PlacementPlan, learned: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """Seconds of the request by stage, then by "DEVICE KIND", as they were before `learned` was multiplied in.

    learned: factors that the space's profile holds already, by the same names.
    """
    base = _stages(space, plan, {})
    found: dict[str, dict[str, float]] = {stage: {} for stage in base}
    for device in plan.devices:
        for kind in KINDS:
            if device == HOST and kind in (TRANSFERS, CHANGES):
                continue  # those of the other device
            name = f"{device} {kind}"
            for stage, seconds in _stages(space, plan, {name: 1 + _STEP}).items():
                term = (seconds - base[stage]) / _STEP / learned.get(name, 1.0)
                if term > 1e-9:
                    found[stage][name] = term
    return found


def _stages(space: Space, plan: PlacementPlan, factors: Mapping[str, float]) -> dict[str, float]:
    """Seconds of prefill and decode with these factors on the profile's times."""
    other = replace(space, profile=space.profile.corrected(factors), _builders={}, _whole={}) if factors else space
    builder = other.builder_of(plan)
    homes, work = builder.costs.homes(plan), builder.workload
    return {
        "prefill": builder.predictor.ttft(homes, work.n_prompt, work.depth) if work.n_prompt else 0.0,
        "decode": max(0, work.n_generate - 1) * builder.predictor.tpot(homes, work.middle, work.n_parallel),
    }
