"""What one would do without a solver: all layers on one device, equal parts, parts by memory; None: too large."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .costs import Costs, make_costs
from .problem import Problem

Layers = tuple[str, ...]


def alone(problem: Problem, name: str) -> Layers | None:
    """Every layer on one device."""
    return _fitting(problem, make_costs(problem), [float(device.name == name) for device in problem.devices])


def equal_parts(problem: Problem) -> Layers | None:
    """As many layers on each device as on any other, in the order of devices.toml; the client's if it has memory."""
    costs = make_costs(problem)
    return _fitting(problem, costs, [float(room > 0) for room in costs.capacity])


def by_memory(problem: Problem) -> Layers | None:
    """Layers in proportion to memory, as llama.cpp deals them out."""
    costs = make_costs(problem)
    return _fitting(problem, costs, costs.capacity.tolist())


def _fitting(problem: Problem, costs: Costs, weights: Sequence[float]) -> Layers | None:
    """Consecutive layers in proportion to the weights, rounded as llama.cpp does: by where a layer begins."""
    n_layers = len(problem.layers)
    ends = np.cumsum(weights) / sum(weights) if sum(weights) else np.zeros(len(weights))
    at = np.searchsorted(ends, np.arange(n_layers) / n_layers, side="right")
    if at.max() >= len(weights) or not costs.fits(tuple(at.tolist())):
        return None
    return tuple(problem.devices[i].name for i in at)
