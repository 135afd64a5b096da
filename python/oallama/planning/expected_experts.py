"""What accelerators are expected to compute of a mixture's experts: a plan's places, priced by how experts are used."""

from __future__ import annotations

from ..data.layer_experts import ExpectedExperts, ExpectedHits, layer_experts
from ..data.plan import PlacementPlan
from .expert_use import ExpertUse


def expected_experts(plan: PlacementPlan, use: ExpertUse | None) -> ExpectedExperts | None:
    """Each layer's own shares. None for a dense model."""
    if use is None:
        return None
    accelerators = {*plan.devices[:-1]}
    layers = {}
    for place in layer_experts(plan):
        if place.home in accelerators:
            layers[place.layer] = ExpectedHits(use.n_experts, 1.0, 1.0)
        elif place.held:
            held = use.held(place.slots and use.slots is not None)
            decode, prefill = (round(held.share(place.layer, place.held, stage), 6) for stage in ("decode", "prefill"))
            layers[place.layer] = ExpectedHits(place.held, decode, prefill)
    return ExpectedExperts("trace" if use.from_trace else "uniform", use.n_experts, use.n_used, layers)
