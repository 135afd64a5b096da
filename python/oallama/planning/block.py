"""Seconds of a run of consecutive operators for many placements at once.

The whole graph is one block; the exact planner cuts it at the layers. Axis 0 of every array is the placement.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product

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


@dataclass(frozen=True)
class Still:
    """What a stage takes at any depth, one number per placement: all but attention and cached rows that are copied.

    link, first: seconds of all streamed copies, and of the longest of them, which nothing hides; None: there are none.
    """

    targets: Floats
    transfers: Floats
    switches: Floats
    other: Floats
    link: Floats | None = None
    first: Floats | None = None


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
        # Edges in the order of their producers.
        order = np.argsort(producer, kind="stable")
        producer, self._reader = producer[order], consumer[order]
        self._begins = np.flatnonzero(np.r_[True, producer[1:] != producer[:-1]][: len(producer)])
        self._operator: Ints = producer[self._begins]
        self._source = np.array([column.get(p, p - first) for p in self._operator.tolist()], dtype=np.intp)
        self.runs: Mask = np.ones(self.n, dtype=bool)
        if not logits:
            self.runs = ~(graph.output_rows | graph.is_output)[first:end]
        self.target = np.flatnonzero((graph.target[first:end] >= 0) & self.runs)
        self.small = np.flatnonzero((graph.small[first:end] >= 0) & self.runs)
        self.attention = np.flatnonzero((graph.attention_layer[first:end] >= 0) & self.runs)
        self._layer = graph.attention_layer[first + self.attention]
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
    ) -> StageSeconds:
        """Seconds for placements (rows); `still` and `at_depth` in one.

        price: as in `at_depth`; the other arguments as in `still`.
        """
        still = self.still(costs, ids, uploaded, following, streamed=streamed)
        return self.at_depth(costs, still, ids, depth, price=price)

    def still(
        self,
        costs: CostModel,
        ids: Ids,
        uploaded: Mask,
        following: Ids | None,
        *,
        streamed: Mask | None = None,
        host: Floats | None = None,
    ) -> Still:
        """Seconds for placements (rows) that do not depend on the depth.

        Args:
            ids: (placements, columns) device ids.
            uploaded: (placements, operators) the weight lives on the host and is uploaded to where the operator runs.
            following: (placements,) device of the operator after the block, None after the last one.
            streamed: (placements, operators) the weight is streamed to where the operator runs.
            host: (placements, targets) seconds on the host of the block's targets; None: the stage's own.
        """
        at, first = self.at, self.first
        # Operators are rows from here on: with many placements each is a long vector.
        columns = np.ascontiguousarray(ids.T)
        own, devices = columns[: self.n], range(len(costs.names))
        moved, where = uploaded.T[self.target], own[self.target]
        targets = np.where(moved, at.upload[first + self.target, None], 0.0).sum(axis=0)
        for device in devices:
            resident = (where == device) & ~moved
            if device or host is None:
                targets += at.seconds[device, first + self.target] @ resident
            else:
                targets += np.where(resident, host.T, 0.0).sum(axis=0)

        transfers = self._copies(columns)
        for op in self._output:
            transfers += at.move[own[op], 0, first + op]
        small = at.small_upload[at.graph.small[first + self.small]]
        transfers += np.where(uploaded.T[self.small], small[:, None], 0.0).sum(axis=0)

        path = own[self.runs]
        if following is not None:
            path = np.concatenate([path, following[None, :]])
        switches, other = np.zeros(len(ids)), np.zeros(len(ids))
        for source, to in product(devices, devices):
            if costs.switch[source, to]:
                switches += costs.switch[source, to] * ((path[:-1] == source) & (path[1:] == to)).sum(axis=0)
        for device in devices:
            other += at.other[device, first + self._others] @ (own[self._others] == device)
        for fusion in self._fusions:
            other += fusion.seconds(ids)
        if streamed is None:
            return Still(targets, transfers, switches, other)
        each = np.where(streamed[:, self.target], at.stream[first + self.target], 0.0)
        return Still(targets, transfers, switches, other, each.sum(axis=1), each.max(axis=1, initial=0.0))

    def at_depth(
        self,
        costs: CostModel,
        still: Still,
        ids: Ids,
        depth: int,
        *,
        price: float | None = None,
        stream_caches: Mask | None = None,
    ) -> StageSeconds:
        """All seconds when the last token sees `depth` positions of the KV cache.

        Args:
            price: None: streamed copies hide behind the block (it is the whole graph). Else what hides is linear, so
                that blocks may be added up: `price` (0 to 1) is the weight of "copies take longer" against "all else
                takes longer"; any gives a lower bound of the whole graph's seconds.
            stream_caches: (placements, layers) attention reads a cache on the host; None: none does.
        """
        attention, transfers = self.attention_seconds(costs, ids, depth), still.transfers
        copies = np.zeros(len(ids))
        if still.link is not None and still.first is not None:
            rest = still.targets + attention + transfers + still.switches + still.other
            copies = _exposed(still.link, still.first, rest, costs.overlap, price)
        if stream_caches is not None:
            transfers = transfers + self._cache_seconds(costs, stream_caches, depth)
        return StageSeconds(still.targets, attention, transfers, still.switches, still.other, copies)

    def _cache_seconds(self, costs: CostModel, streamed: Mask, depth: int) -> Floats:
        """Copies of KV caches to the device that attends to them: it waits for them, and they hold up the link."""
        seconds = np.zeros(len(streamed))
        caches, _ = self._sequences(costs)
        for layer in self._layer.tolist():
            shape = costs.graph.attention[layer]
            if shape is not None:
                seconds += np.where(streamed[:, layer], caches * costs.cache_s(shape, max(depth, 1)), 0.0)
        return seconds

    def _sequences(self, costs: CostModel) -> tuple[int, int]:
        """(sequences, tokens of each): in a decode step every token is one of another sequence, with its own cache."""
        n_tokens = self.at.n_tokens
        return (n_tokens, 1) if self.at.graph.tier == costs.decode_tier else (1, n_tokens)

    def attention_seconds(self, costs: CostModel, ids: Ids, depth: int) -> Floats:
        """Seconds of the block's attention alone, at another depth."""
        seconds = np.zeros(len(ids))
        times, tokens = self._sequences(costs)
        shapes = [costs.graph.attention[layer] for layer in self._layer.tolist()]
        for shape in {shape: None for shape in shapes if shape is not None}:
            alike = self.attention[[shape == other for other in shapes]]
            seconds += times * costs.attention_s(shape, tokens, max(depth, 1))[ids[:, alike]].sum(axis=1)
        return seconds

    def _copies(self, columns: Ids) -> Floats:
        """(placements,) a result is copied once to a device that reads it, however many operators do.

        columns: (columns, placements).
        """
        seconds = np.zeros(columns.shape[1])
        if not len(self._begins):
            return seconds
        sources, readers = columns[self._source], columns[self._reader]
        readers[~self.runs[self._reader]] = -1
        for to in range(len(self.at.move)):
            read: Mask = np.logical_or.reduceat(readers == to, self._begins, axis=0)
            for source in range(len(self.at.move)):
                if source != to:
                    seconds += self.at.move[source, to, self._operator] @ (read & (sources == source))
        return seconds


def _exposed(copies: Floats, first: Floats, rest: Floats, overlap: float, price: float | None) -> Floats:
    """What streamed copies add to the rest: they hide behind it, all but the first one, and it behind them."""
    if price is None:
        hidden = np.minimum(rest, copies - first)
        return copies - overlap * hidden
    return copies * (1 - overlap + price * overlap) - price * overlap * rest
