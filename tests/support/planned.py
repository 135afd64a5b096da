"""Plans of made models on made machines."""

from __future__ import annotations

from oallama.data.plan import PlacementPlan
from oallama.planning import make_plans
from support.synthetic import CONTEXT, DEVICE, graph, space

MODEL = graph()


def plan(model=MODEL, budget="auto", memory=None, planner="oato", **kwargs) -> PlacementPlan:
    return make_plans(space(model, budget, memory=memory, **kwargs), planner).best


def smallest(model=MODEL, context=CONTEXT) -> int:
    """Bytes of KV cache, compute and small weights with every target on the host."""
    builder = space(model, context=context).builder(context)
    return builder.dry_run(builder.by_homes(builder.uniform(1, builder.uniform(0).targets))).on(DEVICE).total
