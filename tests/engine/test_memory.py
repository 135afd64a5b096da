"""Predicted bytes are the bytes: a grid of architectures, budgets, contexts and KV types on a real second device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from oallama.data.plan import ContextSettings, PlacementPlan
from oallama.engine import skeleton
from oallama.engine.load_settings import Settings
from oallama.loading import autoplan
from oallama.planning import Space, Workload, make_plans, parse_budget
from support.ledger import device_bytes
from support.logits import ARCHITECTURES
from support.made_profile import made_profile

SHARES = (0.25, 0.5, 1.0)  # of the weights, beside KV cache and compute buffers
GRID = list(product(ARCHITECTURES, SHARES, (256, 2048), ("f16", "q8_0")))
assert len(GRID) >= 40


# One in five of the grid meets every value of every axis.
@pytest.mark.parametrize(
    ("arch", "share", "n_ctx", "kv"),
    [pytest.param(*cell, marks=[pytest.mark.slow] if i % 5 else []) for i, cell in enumerate(GRID)],
)
def test_measured_bytes_equal_the_prediction_and_keep_the_budget(
    arch: str, share: float, n_ctx: int, kv: str, tiny: Callable[..., Path], rpc, record_property
) -> None:
    path, device = tiny(arch), rpc.devices[0]
    context = ContextSettings(n_ctx, n_batch=256, n_ubatch=256, type_k=kv, type_v=kv, flash_attn="on")
    settings = Settings(**vars(context), devices=(device,))
    graph = autoplan.read_graph(path, settings)
    everything = skeleton.dry_run(path, settings)[device]
    budget = int(everything["kv"] + everything["compute"] + share * everything["weights"])

    def memory(draft: PlacementPlan) -> dict[str, dict[str, int]]:
        return skeleton.dry_run(path, replace(settings, **vars(draft.context)), draft.to_backend_map())

    space = Space(
        graphs={context.flash_attn: graph},
        profile=made_profile(path, device, settings),
        accelerators=(device,),
        budgets={device: parse_budget(budget, weights_bytes=graph.weights_bytes, free_bytes=0)},
        memory=memory,
        context=context,
        workload=Workload(),
        n_outputs_max=1,
        free_ubatch=True,
    )
    plan = make_plans(space, "exact").best
    predicted = plan.predicted.devices[device].total
    measured = device_bytes(path, replace(settings, **vars(plan.context)), plan, device)

    record_property("predicted", predicted)
    record_property("measured", measured)
    assert abs(measured - predicted) <= predicted // 100
    assert budget // 2 < measured <= budget
