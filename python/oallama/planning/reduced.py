"""The reduced graph of OATO's transfer correction: target operators and the neighbours that never move.

An operator without a place of its own (an activation between two matrices) is contracted. An operator that runs on the
same side whether all targets are on the device or all on the host is an anchor: norms and the residual stream beside
them, attention, the embedding.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from .stage import Homes, Mask, StageGraph


@dataclass(frozen=True)
class ReducedEdge:
    """Data that crosses when target `i` and its neighbour are on different sides.

    The neighbour is target `j`, or an anchor where `j` is None. `direction` is known for anchors only: with target `i`
    opposite the anchor, the data goes that way. `nbytes` is for one token; `is_logits` marks the result the host reads.
    """

    i: int
    j: int | None
    anchor_on_device: bool
    direction: Literal["h2d", "d2h"] | None
    nbytes: float
    is_logits: bool = False


def reduced_edges(graph: StageGraph, homes: Homes) -> list[ReducedEdge]:
    """All edges between targets and to anchors; `homes` gives what does not move (layers, small weights).

    A contracted path carries the smaller of its first and last tensor: the scheduler cuts at either end. Three targets
    that read one norm count three transfers although one copy serves them: OATO's T' is per operator, and predictions
    count copies exactly.
    """
    tokens = graph.tokens(1)
    on_host, on_device = (
        graph.assign(
            replace(homes, targets=np.full_like(homes.targets, side), upload=np.zeros_like(homes.upload)),
            tokens,
        )
        for side in (0, 1)
    )
    fixed = (on_host == on_device) & (graph.target < 0)
    nbytes = graph.bytes_out(1)
    edges: list[ReducedEdge] = []
    for op in graph.operators:
        if not op.is_target:
            continue
        i = int(graph.target[op.index])
        for end, near in _neighbours(graph, op.index, True, fixed):
            carried = float(min(nbytes[end], nbytes[near]))
            if graph.target[end] < 0:
                side = bool(on_host[end])
                edges.append(ReducedEdge(i, None, side, "d2h" if side else "h2d", carried))
            elif graph.target[end] != i:
                edges.append(ReducedEdge(i, int(graph.target[end]), False, None, carried))
        # Several consumers on one side share one copy of the result.
        copies: dict[bool, float] = {}
        for end, near in _neighbours(graph, op.index, False, fixed):
            if graph.target[end] < 0:  # edges between targets were found from their consumer
                side = bool(on_host[end])
                copies[side] = max(copies.get(side, 0.0), float(min(nbytes[op.index], nbytes[near])))
        edges += [ReducedEdge(i, None, side, "h2d" if side else "d2h", carried) for side, carried in copies.items()]
        if not op.consumers:
            edges.append(ReducedEdge(i, None, False, "d2h", float(nbytes[op.index]), is_logits=True))
    return edges


def _neighbours(graph: StageGraph, start: int, upwards: bool, fixed: Mask) -> Iterator[tuple[int, int]]:
    """(target or anchor, operator whose result is the path's other tensor) reachable through contracted operators.

    Upwards the other tensor enters `start`; downwards it enters the neighbour.
    """
    ops = graph.operators
    first = ops[start].producers if upwards else ops[start].consumers
    todo = [(at, at if upwards else start) for at in first]
    seen: set[int] = set()
    while todo:
        at, near = todo.pop()
        if at in seen:
            continue
        seen.add(at)
        if fixed[at] or graph.target[at] >= 0:
            yield at, near
        elif upwards:
            todo += [(p, near) for p in ops[at].producers]
        else:
            todo += [(c, at) for c in ops[at].consumers]
