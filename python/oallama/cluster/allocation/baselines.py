"""What one would do without a solver: all layers on one device, equal parts, parts by memory; None: too large."""

from __future__ import annotations

import numpy as np

from .costs import Costs, Floats, make_costs
from .problem import Problem

Layers = tuple[str, ...]


def baselines(problem: Problem) -> dict[str, Layers | None]:
    """By name: every layer on one device; as many on each (on the client's if it has memory); in proportion to memory,
    as llama.cpp deals them out.
    """
    costs = make_costs(problem)
    devices = enumerate(problem.devices[1:], 1)
    weights = {f"{device.name} alone": np.eye(len(problem.devices))[at] for at, device in devices}
    weights |= {"equal parts": (costs.capacity > 0).astype(float), "parts by memory": costs.capacity.astype(float)}
    return {name: _fitting(problem, costs, each) for name, each in weights.items()}


def _fitting(problem: Problem, costs: Costs, weights: Floats) -> Layers | None:
    """Consecutive layers in proportion to the weights, rounded as llama.cpp does: by where a layer begins."""
    n_layers = len(problem.layers)
    ends = np.cumsum(weights) / max(weights.sum(), 1e-9)
    at = np.searchsorted(ends, np.arange(n_layers) / n_layers, side="right")
    if at.max() >= len(weights) or not costs.fits(tuple(at.tolist())):
        return None
    return tuple(problem.devices[i].name for i in at)
