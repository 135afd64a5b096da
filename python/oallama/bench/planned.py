"""The engine of a plan: what the planner decided and predicted, as something to measure."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from ..data.plan import PlacementPlan
from ..engine.load_settings import LOAD_MODES
from .baselines import ALL_LAYERS
from .engines import Engine, LoadParams
from .results import Cell, ExpectedTimes


def planned(
    plan: PlacementPlan,
    lib_dir: str | os.PathLike[str],
    params: LoadParams | None = None,
    name: str = "oallama",
    placement: str | None = None,
) -> Engine:
    """The patched engine obeying a plan, in the context that the plan was made for.

    params: what a plan does not fix (n_threads, rpc_servers; load_mode, where the plan leaves it to llama.cpp); all
    else comes from the plan.
    """
    context, memory = plan.context, plan.predicted.devices
    params = params or LoadParams()
    fixed = replace(
        params,
        load_mode=params.load_mode if context.use_mmap is None else LOAD_MODES[context.use_mmap],
        n_ctx=context.n_ctx,
        n_batch=context.n_batch,
        n_ubatch=context.n_ubatch,
        n_outputs_max=context.n_outputs_max,
        type_k=context.type_k,
        type_v=context.type_v,
        flash_attn=context.flash_attn,
        n_gpu_layers=ALL_LAYERS,
        devices=tuple(device for device in plan.devices if device != "CPU"),
    )
    return Engine(
        name=name,
        lib_dir=lib_dir,
        params=fixed,
        placement=placement or f"plan {plan.hash[:8]}",
        backend_map=plan.to_backend_map(),
        plan_hash=plan.hash,
        predicted_bytes={device: memory[device].buffers for device in fixed.devices or () if device in memory},
        predict=lambda cell: _predict(plan, cell),
    )


def _predict(plan: PlacementPlan, cell: Cell) -> ExpectedTimes:
    """The plan's TTFT by prompt length (of an empty cache), and its TPOT at the depth half-way through the tokens."""
    ttft = _interpolate(plan.predicted.ttft_s, cell.prompt) if cell.depth == 0 else None
    return ExpectedTimes(ttft, _interpolate(plan.predicted.tpot_s, cell.depth + cell.prompt + cell.gen / 2))


def _interpolate(table: Mapping[int, float], at: float) -> float | None:
    """Linear between the plan's points; None outside of them, where it promised nothing."""
    points = sorted(table)
    if not points or not points[0] <= at <= points[-1]:
        return None
    return float(np.interp(at, points, [table[p] for p in points]))
