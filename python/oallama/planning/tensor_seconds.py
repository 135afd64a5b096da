"""What each weight takes on every device: what a picture of a plan says of its cells."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from ..data.plan import PlacementPlan
from .cost import CostModel
from .space import Space


@dataclass(frozen=True)
class TensorSeconds:
    """Seconds by device, of all operators that read the weight.

    decode: of a step, in which each of the plan's sequences gets a token. prefill: of a micro-batch.
    """

    decode: Mapping[str, float]
    prefill: Mapping[str, float]


def tensor_seconds(space: Space, plan: PlacementPlan) -> dict[str, TensorSeconds]:
    """Of every weight that operators multiply with, by name, in the context of one of the space's plans."""
    costs = space.builder_of(plan).costs
    decode = _pass(costs, plan.planner["params"].get("n_parallel", 1), True)
    prefill = _pass(costs, plan.context.n_ubatch, False)
    return {name: TensorSeconds(decode[name], prefill.get(name, {})) for name in decode}


def _pass(costs: CostModel, n_tokens: int, decode: bool) -> dict[str, dict[str, float]]:
    at = costs.stage(n_tokens, decode)
    found: dict[str, dict[str, float]] = defaultdict(lambda: dict.fromkeys(costs.names, 0.0))
    for op in at.graph.operators:
        if op.is_target and op.weight:
            for device, seconds in zip(costs.names, at.seconds[:, op.index].tolist(), strict=True):
                found[op.weight][device] += seconds
    return found
