"""Predicted bytes are the bytes: a grid of architectures, budgets, contexts and KV types on a real second device."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import permutations, product
from pathlib import Path
from typing import Any

import pytest

from oallama import Llama, modelmaker
from oallama.data.plan import ContextSettings, PlacementPlan
from oallama.engine import native, skeleton
from oallama.engine.load_settings import Settings
from oallama.loading import autoplan, start
from oallama.loading.autoplan import Choices
from oallama.planning import Space, Workload, make_plans, parse_budget
from support.expert_slots import plan_of
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


def ledger_now() -> dict[str, int]:
    return {name: entry["current"] for name, entry in native.core().ledger().items() if entry["current"]}


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_the_ledger_returns_to_where_it_was(order: tuple[int, ...], tiny: Callable[..., Path]) -> None:
    """Models with repacked weights, which change their buffer's type, and without, two at a time, closed in turn."""
    paths = [tiny("llama", "Q4_0"), tiny("qwen2", "F16"), tiny("qwen3moe", "Q4_0")]
    open_and_close([(paths[i], None) for i in (*order, order[0])])


@pytest.mark.parametrize("seed", range(3))
def test_the_ledger_of_every_kind_of_model_returns_to_where_it_was(
    seed: int, tiny: Callable[..., Path], rpc: Any
) -> None:
    """All architectures, one whose experts come and go, one that is streamed: each twice, in any order."""
    device, settings = rpc.devices[0], Settings(n_ctx=256, n_threads=1)
    kinds: list[tuple[Path, PlacementPlan | None]] = [
        (tiny(arch, "MXFP4" if arch == "gpt-oss" else "Q4_0"), None) for arch in modelmaker.ARCHITECTURES
    ]
    mixture, dense = tiny("qwen3moe", "Q8_0"), tiny("llama", "Q8_0")
    choices = Choices(device=device, profile=made_profile(dense, device, settings))
    kinds += [
        (mixture, plan_of(mixture, device, slots=4)),
        (dense, start.plan_model(dense, "minimal", settings, choices)),
    ]
    order = [*kinds, *kinds]
    random.Random(seed).shuffle(order)
    open_and_close(order)


def open_and_close(models: Sequence[tuple[Path, PlacementPlan | None]]) -> None:
    """Two models at a time, the older one closed first."""
    before, there = ledger_now(), list[Llama]()
    for path, plan in models:
        given = {"plan": plan} if plan else {"n_ctx": 256}
        there.append(Llama(str(path), **given, n_threads=1, verbose=False))
        there[-1].eval(list(range(300, 320)))
        assert 0 < there[-1].placement()["CPU"].process_bytes < 2**40
        if len(there) == 2:
            there.pop(0).close()
    for llm in there:
        llm.close()
    assert ledger_now() == before
