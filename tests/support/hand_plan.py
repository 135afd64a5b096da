"""A plan without a planner: who tests what happens to a plan should not depend on how one is made."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from oallama.data.plan import (
    HOST,
    ContextSettings,
    DeviceMemory,
    Mode,
    PlacementPlan,
    Prediction,
    TensorPlacement,
    is_divided_by_columns,
)
from oallama.engine.load_settings import Settings
from oallama.loading import autoplan

CONTEXT = ContextSettings(n_ctx=256, n_batch=256, n_ubatch=256)


def hand_plan(
    model: Path, device: str, on_host: str = "ffn", name: str = "hand", workload: tuple[int, int] = (16, 8)
) -> PlacementPlan:
    """All on `device` but the embedding and the matrices whose name contains `on_host`; HOST: all on the CPU.

    Predicted times are easy to follow: 10 ms a prompt token, TPOT 1 s at an empty cache and 1 ms more per token.
    """
    graph = autoplan.read_graph(model, Settings(n_ctx=CONTEXT.n_ctx))
    tensors = {}
    for t in graph.tensors:
        stays = device == HOST or t.name.startswith("token_embd") or (on_host in t.name and "norm" not in t.name)
        tensors[t.name] = TensorPlacement.whole(
            t.type, t.nbytes, HOST if stays else device, "host" if stays else "resident"
        )
    devices = (HOST,) if device == HOST else (device, HOST)
    n_prompt, n_generate = workload
    return PlacementPlan(
        model=dict(graph.model),
        planner={"name": name, "params": {}},
        budgets={},
        context=CONTEXT,
        devices=devices,
        layers=(device,) * (graph.n_layer + 1),
        tensors=tensors,
        predicted=Prediction(
            devices={d: DeviceMemory(sum(t.nbytes for t in tensors.values() if t.device == d), 0, 0) for d in devices},
            ttft_s={1: 0.01, 100: 1.0},
            tpot_s={0: 1.0, 100: 1.1},
            workload=workload,
            request_s=0.01 * n_prompt + (n_generate - 1) * (1 + 1e-3 * (n_prompt + n_generate / 2)),
        ),
        tied_output=graph.tied_output,
    )


def divided_plan(model: Path, device: str) -> PlacementPlan:
    """Half of every feed-forward beside the other half, which stays on the host."""
    plan, graph = hand_plan(model, device), autoplan.read_graph(model, Settings(n_ctx=CONTEXT.n_ctx))
    tensors = dict(plan.tensors)
    for t in graph.tensors:
        if tensors[t.name].device == HOST and "ffn" in t.name:
            width = t.ne[0 if is_divided_by_columns(t.name) else 1]
            tensors[t.name] = TensorPlacement.divided(tensors[t.name], device, width // 2, width)
    return replace(plan, tensors=tensors)


def streamed_plan(model: Path, device: str) -> PlacementPlan:
    """Every matrix and every KV cache on the host, streamed from one token on through two slots."""
    plan = hand_plan(model, device, on_host=".weight", name="streamed")
    tensors = {
        name: TensorPlacement.whole(t.type, t.nbytes, HOST, "stream", stream_from=1)
        if t.device == HOST and not name.startswith("token_embd")
        else t
        for name, t in plan.tensors.items()
    }
    return replace(
        plan,
        context=replace(CONTEXT, flash_attn="on"),
        layers=(HOST,) * len(plan.layers),
        tensors=tensors,
        stream_slots=2,
        stream_caches=True,
    )


def realised(
    plan: PlacementPlan, realisation: str, mode: Mode = "host", start: int = 0, type: str = "q4_0", only: str = ""
) -> PlacementPlan:
    """The plan with its matrices of this type on the CPU, or those whose names contain `only`, in this mode and
    realisation."""
    tensors = {}
    for name, t in plan.tensors.items():
        if t.device == HOST and t.type == type and name != "token_embd.weight" and only in name:
            segment = replace(t.segments[0], mode=mode, stream_from=start, realisation=realisation)
            t = replace(t, segments=(segment,))
        tensors[name] = t
    return replace(plan, tensors=tensors)
