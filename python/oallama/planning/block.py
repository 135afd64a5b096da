"""Seconds of a run of consecutive operators for many placements at once.

The whole graph is one block; the exact planner cuts it at the layers. Axis 0 of every array is the placement.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..data.fusion import Fusion
from .cost import CostModel, Floats, StageCosts
from .stage import Ids, Mask

Ints = NDArray[np.intp]


@dataclass(frozen=True)
class StageSeconds:
    """Where the seconds of one stage go, one number per placement.

    other: the small operators, and what chains of operators take less in one piece. copies: what streamed weights and
    caches add to all of these, after what is hidden behind them.
    """

    targets: Floats
    attention: Floats
    transfers: Floats
    switches: Floats
    other: Floats
    copies: Floats

    @property
    def total(self) -> Floats:
        return self.targets + self.attention + self.transfers + self.switches + self.other + self.copies


class Block:
    """Operators [first, end) of one stage and what they read.

    Device ids of the block's operators are columns 0..n-1; the producers outside of the block that it reads
    (`outside`, as operator indices) follow as further columns. `logits` is False where nobody wants the logits: the
    operators that see output rows only do not run then.
    """

    def __init__(self, at: StageCosts, first: int, end: int, logits: bool = True) -> None:
        graph = at.graph
        self.at, self.first, self.n, self.logits = at, first, end - first, logits
        inside = (graph.consumer >= first) & (graph.consumer < end)
        producer, consumer = graph.producer[inside], graph.consumer[inside] - first
        self.outside: tuple[int, ...] = tuple(sorted({int(p) for p in producer if p < first}))
        column = {p: self.n + i for i, p in enumerate(self.outside)}
        self._source = np.array([column.get(int(p), int(p) - first) for p in producer], dtype=np.intp)
        self._operator = producer
        self._reader = consumer
        self._siblings = _earlier_readers(producer, consumer)
        self.runs: Mask = np.ones(self.n, dtype=bool)
        if not logits:
            self.runs = ~(graph.output_rows | graph.is_output)[first:end]
        self.target = np.flatnonzero((graph.target[first:end] >= 0) & self.runs)
        self.small = np.flatnonzero((graph.small[first:end] >= 0) & self.runs)
        self.attention = np.flatnonzero((graph.attention_layer[first:end] >= 0) & self.runs)
        self._output = np.flatnonzero(graph.is_output[first:end] & self.runs)
        self._others = np.flatnonzero(
            (graph.target[first:end] < 0) & (graph.attention_layer[first:end] < 0) & self.runs
        )
        self._fusions = [self._inside(fusion, column) for fusion in at.fusions]

    def _inside(self, fusion: Fusion, outside: Mapping[int, int]) -> Fusion:
        """The chains that end in the block, their operators as columns."""
        last = fusion.ops[:, -1] - self.first
        inside = (last >= 0) & (last < self.n)
        inside[inside] = self.runs[last[inside]]
        columns = [[outside.get(op, op - self.first) for op in chain] for chain in fusion.ops[inside].tolist()]
        return fusion.at(inside, np.array(columns, dtype=np.intp).reshape(-1, fusion.ops.shape[1]))

    def seconds(
        self,
        costs: CostModel,
        ids: Ids,
        uploaded: Mask,
        depth: int,
        following: Ids | None,
        *,
        streamed: Mask | None = None,
        price: float | None = None,
        stream_caches: Mask | None = None,
        host: Floats | None = None,
    ) -> StageSeconds:
        """Seconds for placements (rows).

        Args:
            ids: (placements, columns) device ids.
            uploaded: (placements, operators) the weight lives on the host and is uploaded to where the operator runs.
            depth: positions in the KV cache that the last token sees.
            following: (placements,) device of the operator after the block, None after the last one.
            streamed: (placements, operators) the weight is streamed to where the operator runs.
            price: None: streamed copies hide behind the block (it is the whole graph). Else what hides is linear, so
                that blocks may be added up: `price` (0 to 1) is the weight of "copies take longer" against "all else
                takes longer"; any gives a lower bound of the whole graph's seconds.
            stream_caches: (placements, layers) attention reads a cache on the host; None: none does.
            host: seconds on the host of the block's targets; None: the stage's own.
        """
        at, first = self.at, self.first
        own = ids[:, : self.n]
        moved, where = uploaded[:, self.target], own[:, self.target]
        resident = at.seconds[where, first + self.target]
        if host is not None:
            resident = np.where(where == 0, host, resident)
        targets = np.where(moved, at.upload[first + self.target], resident).sum(axis=1)

        attention = self.attention_seconds(costs, ids, depth)
        transfers = self._copies(ids)
        for op in self._output:
            transfers += at.move[own[:, op], 0, first + op]
        for op in self.small:
            transfers += np.where(uploaded[:, op], at.small_upload[at.graph.small[first + op]], 0.0)

        path = own[:, self.runs]
        if following is not None:
            path = np.concatenate([path, following[:, None]], axis=1)
        switches = costs.switch[path[:, :-1], path[:, 1:]].sum(axis=1)
        other = at.other[own[:, self._others]].sum(axis=1)
        for fusion in self._fusions:
            other += fusion.seconds(ids)
        copies = np.zeros(len(ids))
        if streamed is not None:
            each = np.where(streamed[:, self.target], at.stream[first + self.target], 0.0)
            rest = targets + attention + transfers + switches + other
            copies = _exposed(each.sum(axis=1), each.max(axis=1, initial=0.0), rest, costs.overlap, price)
        if stream_caches is not None:
            transfers = transfers + self._cache_seconds(costs, stream_caches, depth)
        return StageSeconds(targets, attention, transfers, switches, other, copies)

    def _cache_seconds(self, costs: CostModel, streamed: Mask, depth: int) -> Floats:
        """Copies of KV caches to the device that attends to them: it waits for them, and they hold up the link."""
        seconds = np.zeros(len(streamed))
        for op in self.attention:
            layer = self.at.graph.attention_layer[self.first + op]
            shape = costs.graph.attention[layer]
            if shape is not None:
                seconds += np.where(streamed[:, layer], costs.cache_s(shape, max(depth, 1)), 0.0)
        return seconds

    def attention_seconds(self, costs: CostModel, ids: Ids, depth: int) -> Floats:
        """Seconds of the block's attention alone, at another depth."""
        at, seconds = self.at, np.zeros(len(ids))
        for op in self.attention:
            shape = costs.graph.attention[at.graph.attention_layer[self.first + op]]
            if shape is not None:
                decode = at.graph.tier == costs.decode_tier
                times, tokens = (at.n_tokens, 1) if decode else (1, at.n_tokens)
                seconds += times * costs.attention_s(shape, tokens, max(depth, 1))[ids[:, op]]
        return seconds

    def _copies(self, ids: Ids) -> Floats:
        """A result is copied once to a device that reads it, however many operators do."""
        seconds = np.zeros(len(ids))
        sources, readers = ids[:, self._source], ids[:, self._reader]
        crossing = (sources != readers) & self.runs[self._reader]
        for edge in np.flatnonzero(crossing.any(axis=0)):
            source, reader, counts = sources[:, edge], readers[:, edge], crossing[:, edge]
            for sibling in self._siblings[edge]:
                counts = counts & (ids[:, sibling] != reader)
            seconds += np.where(counts, self.at.move[source, reader, self._operator[edge]], 0.0)
        return seconds


def _exposed(copies: Floats, first: Floats, rest: Floats, overlap: float, price: float | None) -> Floats:
    """What streamed copies add to the rest: they hide behind it, all but the first one, and it behind them."""
    if price is None:
        hidden = np.minimum(rest, copies - first)
        return copies - overlap * hidden
    return copies * (1 - overlap + price * overlap) - price * overlap * rest


def _earlier_readers(producer: Ints, consumer: Ints) -> list[list[int]]:
    """For every edge the other consumers of its producer that come before it."""
    seen: dict[int, list[int]] = {}
    result = []
    for p, c in zip(producer.tolist(), consumer.tolist(), strict=True):
        result.append([*seen.get(p, ())])
        seen.setdefault(p, []).append(c)
    return result
