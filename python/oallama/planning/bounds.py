"""Seconds that no plan of whole weights within the budgets can be below, found without a dry run.

Weights are the only thing that takes memory here, each goes where its operators take least time, and nothing is ever
moved between devices: a fractional knapsack. Plans that stream or divide weights are not bounded.
"""

from __future__ import annotations

import numpy as np

from ..data.workload import Workload
from .cost import CostModel, Floats
from .layers import Step, steps_of
from .plan_builder import PlanBuilder


def least_seconds(builder: PlanBuilder, workload: Workload) -> float:
    """A lower bound of the request's seconds, for accelerators and the host together."""
    costs = builder.costs
    host, device = np.zeros(len(costs.targets)), np.zeros(len(costs.targets))
    rest = 0.0
    for step in steps_of(costs, workload):
        runs = sum(times for _, times in step.depths)
        on_host, on_device = _by_target(costs, step)
        host += runs * on_host
        device += runs * on_device
        rest += runs * _small(step) + _attention(costs, step)
    saved = np.maximum(host - device, 0.0)
    order = np.argsort(-saved / costs.nbytes, kind="stable")
    before = np.cumsum(costs.nbytes[order]) - costs.nbytes[order]
    room = np.clip(sum(builder.limits) - before, 0, costs.nbytes[order])
    return rest + float(host.sum() - (saved[order] * room / costs.nbytes[order]).sum())


def _by_target(costs: CostModel, step: Step) -> tuple[Floats, Floats]:
    """(targets,) seconds of one run of the stage: on the host, or uploaded where that is faster; on a device."""
    at = step.at
    runs = at.graph.target >= 0
    if not step.logits:
        runs &= ~(at.graph.output_rows | at.graph.is_output)
    on_host = np.minimum(at.host.min(axis=0), np.minimum(at.seconds[0], at.upload))
    return tuple(  # type: ignore[return-value]  # of two
        np.bincount(at.graph.target[runs], seconds[runs], len(costs.targets))
        for seconds in (on_host, at.seconds[1:].min(axis=0))
    )


def _small(step: Step) -> float:
    """Other operators on the fastest device, and all that chains of operators can save in one piece."""
    at = step.at
    runs = (at.graph.target < 0) & (at.graph.attention_layer < 0)
    if not step.logits:
        runs &= ~at.graph.output_rows
    saved = sum(float(np.minimum(fusion.gain, 0.0).min(axis=1).sum()) for fusion in at.fusions)
    return float(at.other.min(axis=0)[runs].sum()) + saved


def _attention(costs: CostModel, step: Step) -> float:
    """In all runs of the stage, on the fastest device."""
    decode = step.at.graph.tier == costs.decode_tier
    times, tokens = (step.at.n_tokens, 1) if decode else (1, step.at.n_tokens)
    shapes = [shape for shape in costs.graph.attention if shape is not None]
    return sum(
        runs * times * float(costs.attention_s(shape, tokens, max(depth, 1)).min())
        for shape in shapes
        for depth, runs in step.depths
    )
