"""Cuts a model's graph into layers, in every stage of a request."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from ..data.workload import Workload
from ..errors import OallamaError
from .cost import CostModel, StageCosts


class NotLayered(OallamaError):
    """The graph cannot be cut into layers; the exact planner does not apply."""


@dataclass(frozen=True)
class Step:
    """One stage of the request: how often it runs, and at which depths."""

    at: StageCosts
    depths: tuple[tuple[int, float], ...]  # (depth, times)
    logits: bool


@dataclass(frozen=True)
class Layer:
    """A layer (or the head): its weights as positions in CostModel.targets and .small, and its KV layer (-1: none)."""

    targets: tuple[int, ...]
    small: tuple[int, ...]
    kv_layer: int


def steps_of(costs: CostModel, workload: Workload) -> list[Step]:
    """The stages of a request: decode, then the prompt's micro-batches by size, the last one by itself."""
    n = max(0, workload.n_generate - 1)
    chunks = workload.chunks(costs.context.n_ubatch)
    steps = []
    if n or not chunks:
        steps = [Step(costs.stage(workload.n_parallel, decode=True), ((workload.middle, float(n)),), True)]
    for tokens, times in Counter(tokens for tokens, _ in chunks[:-1]).items():
        depths = tuple((depth, 1.0) for size, depth in chunks[:-1] if size == tokens)
        assert len(depths) == times
        steps.append(Step(costs.stage(tokens), depths, False))
    if chunks:
        steps.append(Step(costs.stage(chunks[-1][0]), ((chunks[-1][1], 1.0),), True))
    return steps


def cuts_of(at: StageCosts, n_layer: int) -> list[int]:
    """Operators before which the graph is cut: the first pinned one of every layer and of the head; then the end."""
    graph = at.graph
    first: dict[int, int] = {}
    last = -1
    for op in graph.operators:
        if graph.pinned[op.index] and not graph.gets_rows[op.index] and op.layer is not None:
            first.setdefault(op.layer, op.index)
            last = op.index
    head = next((op for op in range(last + 1, len(graph.operators)) if graph.pinned[op]), None)
    cuts = [first.get(il, -1) for il in range(n_layer)] + ([] if head is None else [head])
    if -1 in cuts or sorted(cuts) != cuts or head is None:
        raise NotLayered("the layers of this model are not computed one after the other")
    return [*cuts, len(graph.operators)]


def layers_of(at: StageCosts, cuts: Sequence[int], costs: CostModel) -> list[Layer]:
    """What lies between the cuts."""
    graph = at.graph
    result = []
    for i, (start, end) in enumerate(pairwise(cuts)):
        inside = slice(start, end)
        targets = tuple(sorted({int(t) for t in graph.target[inside] if t >= 0}))
        rows = graph.gets_rows[inside]
        small = tuple(sorted({int(s) for s, r in zip(graph.small[inside], rows, strict=True) if s >= 0 and not r}))
        result.append(Layer(targets, small, i if i < costs.graph.n_layer else -1))
    return result
