"""Predictions assume where the scheduler runs every operator: a real load must cut its graph at the same places."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from oallama import Llama
from oallama.data.plan import HOST, PlacementPlan
from oallama.engine.load_settings import Settings
from oallama.loading import autoplan
from oallama.planning.cost import CostModel
from support.hand_plan import CONTEXT, hand_plan
from support.logits import ARCHITECTURES
from support.made_profile import made_profile

N_PLACEMENTS = 4


def scattered(plan: PlacementPlan, device: str, seed: int) -> PlacementPlan:
    """Weights (norms too) and KV caches of `plan` on random devices; the embedding stays on the CPU."""
    rng = random.Random(seed)
    homes = {HOST: "host", device: "resident"}
    tensors = {}
    for name, tensor in plan.tensors.items():
        home = HOST if name.startswith("token_embd") else rng.choice(list(homes))
        tensors[name] = type(tensor).whole(tensor.type, tensor.nbytes, home, homes[home])
    return replace(plan, tensors=tensors, layers=tuple(rng.choice(list(homes)) for _ in plan.layers))


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("seed", range(N_PLACEMENTS))
def test_decode_is_cut_where_predicted(
    arch: str, seed: int, tiny: Callable[..., Path], rpc: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    path, device, settings = tiny(arch), rpc.devices[0], Settings(n_ctx=CONTEXT.n_ctx)
    plan = scattered(hand_plan(path, device), device, seed)
    costs = CostModel(autoplan.read_graph(path, settings), made_profile(path, device, settings), (device,), CONTEXT)
    stage = costs.stage(1, decode=True)
    ids = stage.graph.assign(costs.homes(plan), stage.tokens, costs.uploader)
    changes = int(np.count_nonzero(np.diff(ids)))
    # A rope away from its layer reads the layer's factors from there: upstream may cut before it, too.
    ropes = [op for op in stage.graph.operators if op.op == "ROPE" and op.weight]
    away = sum(int(ids[op.index]) != costs.ids[plan.layers[op.layer or 0]] for op in ropes)

    capfd.readouterr()
    Llama(str(path), n_ctx=CONTEXT.n_ctx, plan=plan, verbose=True).close()
    splits = int(re.findall(r"splits = (?:\d+ / )?(\d+)", capfd.readouterr().err)[-1])
    assert changes > 2
    assert changes + 1 <= splits <= changes + 1 + away
