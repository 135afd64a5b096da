"""How much a plan loses when what it was made from is wrong, and the plan that loses least.

A draw multiplies every speed, latency, bandwidth, jitter and loss by a factor of its own, log-uniform in
[1/factor, factor]. Memory stays: a plan for memory that is not there does not run at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from .allocation import Allocation, allocate, finish
from .costs import Assignment, make_costs
from .grouped import solve_grouped
from .outcome import Outcome
from .problem import Device, Layer, Problem


@dataclass(frozen=True)
class Robustness:
    """ratios: for every draw, what the plan costs over what the best plan for that draw does (both without the terms
    that no plan changes: w_c * n and the client's embedding and head)."""

    ratios: tuple[float, ...]

    @property
    def mean(self) -> float:
        return float(np.mean(self.ratios))

    @property
    def p95(self) -> float:
        return float(np.quantile(self.ratios, 0.95))

    @property
    def worst(self) -> float:
        return max(self.ratios)


def perturb(problem: Problem, rng: np.random.Generator, factor: float = 1.5) -> Problem:
    """One draw of what the cluster may really be like."""

    def wrong() -> float:
        return float(factor ** rng.uniform(-1, 1))

    speeds = {device.name: wrong() for device in problem.devices}
    devices = tuple(_faster(device, speeds[device.name]) for device in problem.devices)
    links = {
        ends: replace(
            link,
            latency_s=link.latency_s * wrong(),
            bandwidth=link.bandwidth * wrong(),
            jitter_s=link.jitter_s * wrong(),
            loss=min(link.loss * wrong(), 0.99),
        )
        for ends, link in problem.network.links.items()
    }
    # One object per distinct layer, as before: equal layers stay equal.
    layers = {id(layer): _measured_faster(layer, speeds) for layer in (*problem.layers, problem.embedding)}
    return replace(
        problem,
        devices=devices,
        network=replace(problem.network, links=links),
        layers=tuple(layers[id(layer)] for layer in problem.layers),
        embedding=layers[id(problem.embedding)],
    )


def robustness(plans: Sequence[Sequence[str]], draws: Sequence[Problem]) -> list[Robustness]:
    """How each plan (a device name for every layer) fares in every draw, each solved anew."""
    ratios: list[list[float]] = [[] for _ in plans]
    for draw in draws:
        costs = make_costs(draw)
        best = solve_grouped(costs)
        at = {device.name: i for i, device in enumerate(draw.devices)}
        for plan, found in zip(plans, ratios, strict=True):
            found.append(costs.total(tuple(at[name] for name in plan)) / best.bound)
    return [Robustness(tuple(found)) for found in ratios]


def allocate_robust(
    problem: Problem,
    *,
    factor: float = 1.5,
    candidates: int = 20,
    draws: int = 100,
    criterion: Literal["worst", "mean"] = "worst",
    seed: int = 0,
) -> tuple[Allocation, Robustness]:
    """The plan that loses least when every parameter is wrong by up to `factor`, and how it fares.

    Candidates are the plans for the problem as it is and for `candidates` draws; they compete on `draws` others.
    Raises as `allocate` does.
    """
    rng = np.random.default_rng(seed)
    own = [perturb(problem, rng, factor) for _ in range(candidates)]
    plans = list(dict.fromkeys(allocate(variant).layers for variant in (problem, *own)))
    found = robustness(plans, [perturb(problem, rng, factor) for _ in range(draws)])
    best = min(range(len(plans)), key=lambda i: getattr(found[i], criterion))
    costs = make_costs(problem)
    names = [device.name for device in problem.devices]
    assignment: Assignment = tuple(names.index(name) for name in plans[best])
    return finish(problem, costs, Outcome(assignment, solve_grouped(costs).bound), "robust"), found[best]


def _faster(device: Device, by: float) -> Device:
    prefill = device.prefill_flops_per_s
    return replace(
        device, flops_per_s=device.flops_per_s * by, prefill_flops_per_s=None if prefill is None else prefill * by
    )


def _measured_faster(layer: Layer, speeds: dict[str, float]) -> Layer:
    seconds = {name: tuple((n, s / speeds.get(name, 1.0)) for n, s in points) for name, points in layer.seconds.items()}
    return replace(layer, seconds=seconds)
