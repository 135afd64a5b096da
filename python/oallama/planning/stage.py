"""One tier of the operator graph as arrays, and where its operators run, given the homes of weights.

llama.cpp's scheduler decides where operators without a weight run; `StageGraph.assign` follows its rules
(ggml_backend_sched_split_graph, passes 1 and 2), so transfers are counted where they really happen. Device ids: 0 is
the host, 1.. the accelerators in the order of the plan.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ..data.operators import OUTPUT, Operator, OperatorGraph, attention_chains
from ..data.tensor_placement import TensorPlacement

# Upstream uploads host weights from this batch size on (op_offload_min_batch_size of ggml-cuda and ggml-vulkan).
OFFLOAD_MIN_TOKENS = 32
# Streamed weights and caches go to the first accelerator.
STREAMER = 1
_CACHE_WRITERS = frozenset({"SET_ROWS", "CPY", "SET"})
_CACHE_READERS = frozenset({"FLASH_ATTN_EXT", "MUL_MAT"})
# The scheduler does not place these by their (small) weight operand.
_IGNORES_WEIGHT = frozenset({"ROPE", "FLASH_ATTN_EXT"})
_CACHE_LAYER = re.compile(r"_l(\d+)\b")

Ids = NDArray[np.int8]
Mask = NDArray[np.bool_]
# How weights may be divided: not at all, by values alone, or those of a mixture by experts, which stay or come and go.
Division = Literal["", "values", "experts", "slots"]
Ints = NDArray[np.intp]


@dataclass(frozen=True)
class Homes:
    """Homes as device ids, in the order of `CostModel.targets`, `CostModel.small` and the layers (output layer last).

    `upload` and `small_upload` mark host weights that may be uploaded for large batches. stream: per target, tokens
    from which it is streamed when it lives on the host, 0 for never; None: none is. stream_caches: attention over
    caches on the host runs on the first accelerator. split: per target that lives on the host, values (rows or columns,
    divided.py) that also live on the first accelerator, 0 for none; None: none has any. division: what they are, where
    the target is a mixture's. realisation: per target, its position in REALISATIONS, should it live on the host; None:
    as the cost model chose.
    """

    targets: Ids
    upload: Mask
    small: Ids
    small_upload: Mask
    layers: Ids
    stream: Ints | None = None
    stream_caches: bool = False
    split: Ints | None = None
    realisation: Ids | None = None
    division: Division = "values"

    def divided(self, targets: Ints, tokens: Ints | int, uploader: int) -> Mask:
        """Which of these targets (positions) are computed in two parts at so many tokens: those that do not move."""
        if self.split is None:
            return np.zeros(len(targets), dtype=bool)
        uploaded = self.upload[targets] & (uploader > 0) & (np.asarray(tokens) >= OFFLOAD_MIN_TOKENS)
        divided: Mask = (self.split[targets] > 0) & ~uploaded & ~self.streamed(targets, tokens)
        return divided

    def streamed(self, targets: Ints, tokens: Ints | int) -> Mask:
        """Which of these targets (positions) are streamed at so many tokens."""
        if self.stream is None:
            return np.zeros(len(targets), dtype=bool)
        at = self.stream[targets]
        streamed: Mask = (at > 0) & (tokens >= at) & (self.targets[targets] == 0)
        return streamed


class StageGraph:
    """The operators of one tier as arrays indexed by operator. Immutable after construction."""

    @classmethod
    def of(cls, graph: OperatorGraph, tier: int, targets: Mapping[str, int], small: Mapping[str, int]) -> StageGraph:
        """The one of this graph and tier, made once; `targets` and `small` are always the same."""
        if ("stage", tier) not in graph.derived:
            graph.derived["stage", tier] = cls(graph, tier, targets, small)
        found: StageGraph = graph.derived["stage", tier]
        return found

    def __init__(self, graph: OperatorGraph, tier: int, targets: Mapping[str, int], small: Mapping[str, int]) -> None:
        """`targets` and `small` give every weight its position in a `Placement`."""
        self.tier = tier
        self.operators = graph.operators(tier)
        ops = self.operators
        self.target = np.array([targets[op.weight] if op.is_target and op.weight else -1 for op in ops], dtype=np.intp)
        self.small = np.array([_small(op, small) for op in ops], dtype=np.intp)
        self.gets_rows = np.array([op.op == "GET_ROWS" for op in ops], dtype=bool)
        self.is_output = np.array([op.weight == OUTPUT and op.is_target for op in ops], dtype=bool)
        self.cache_layer = np.array([_cache_layer(op) for op in ops], dtype=np.intp)
        self.reads_cache = np.array([op.op in _CACHE_READERS for op in ops], dtype=bool)
        self.attention_layer = np.array(_attention_layers(ops), dtype=np.intp)
        self.nbytes = np.array([op.nbytes_out for op in ops], dtype=np.float64)
        self.producer = np.array([p for op in ops for p in op.producers], dtype=np.intp)
        self.consumer = np.array([op.index for op in ops for _ in op.producers], dtype=np.intp)
        # Operators that a weight or a KV cache holds in place; the others run between two of them.
        self.pinned: Mask = (self.target >= 0) | (self.small >= 0) | (self.cache_layer >= 0)
        self.before, self.after = _nearest(self.pinned)
        at_tier = np.array([op.n_tokens for op in ops], dtype=np.intp)
        # Operators of the last layer that see only the rows whose logits are wanted (the decode tier cannot tell).
        self.output_rows: Mask = (at_tier != tier) & (at_tier == 1)
        self._at_tier = at_tier

    @cached_property
    def structure(self) -> tuple[tuple[object, ...], ...]:
        """What makes an operator like that of another layer: kind, tokens, bytes, how far back each producer is.

        Rows of an embedding are the same for all layers, wherever they were read.
        """
        rows = (self.pinned & self.gets_rows).tolist()
        return tuple(
            (op.op, op.n_tokens, op.nbytes_out, tuple(-1 if rows[p] else op.index - p for p in op.producers))
            for op in self.operators
        )

    def tokens(self, n_tokens: int) -> Ints:
        """Tokens each operator processes when the stage runs with `n_tokens`; logits are computed for one token."""
        tokens = np.where(self._at_tier == self.tier, n_tokens, np.minimum(self._at_tier, n_tokens))
        return np.where(self.is_output & (self.tier > 1), 1, tokens)

    def bytes_out(self, n_tokens: int) -> NDArray[np.float64]:
        """Bytes of each operator's result when the stage runs with `n_tokens`."""
        rows = np.where(self.output_rows, 1.0, n_tokens / self.tier)
        return self.nbytes * rows

    def pins(self, homes: Homes, tokens: Ints, uploader: int) -> Ids:
        """Device ids of pinned operators, 0 elsewhere. `uploader` is the device that takes uploads (0: there is none).

        A weight pulls its operator to its home or, if it may be uploaded and the batch is large, to the uploader, or
        to the first accelerator when it is streamed; what writes the KV cache and attention run where the cache is.
        """
        pins = np.zeros(len(self.operators), dtype=np.int8)
        large = (tokens >= OFFLOAD_MIN_TOKENS) & (uploader > 0)
        at = self.small >= 0
        uploaded = homes.small_upload[self.small[at]] & (large & ~self.gets_rows)[at]
        pins[at] = np.where(uploaded, uploader, homes.small[self.small[at]])
        at = self.target >= 0
        uploaded = homes.upload[self.target[at]] & large[at] & (homes.targets[self.target[at]] == 0)
        there = homes.streamed(self.target[at], tokens[at])
        there |= homes.divided(self.target[at], tokens[at], uploader)
        pins[at] = np.where(uploaded, uploader, np.where(there, STREAMER, homes.targets[self.target[at]]))
        at = self.cache_layer >= 0
        home = homes.layers[self.cache_layer[at]]
        moved = (home == 0) & self.reads_cache[at] & homes.stream_caches
        pins[at] = np.where(moved, STREAMER, home)
        return pins

    def assign(self, homes: Homes, tokens: Ints, uploader: int = 1) -> Ids:
        """Device id of every operator, by the scheduler's rules."""
        return spread(self.pins(homes, tokens, uploader), self.before, self.after)


def division_of(tensors: Iterable[TensorPlacement]) -> Division:
    """How a plan divides a mixture's weights."""
    parts = [s for t in tensors for s in t.segments[1:]]
    return "slots" if any(s.slots for s in parts) else "experts" if any(s.experts for s in parts) else "values"


def spread(pins: Ids, before: Ints, after: Ints) -> Ids:
    """Device ids of all operators (last axis) from those of the pinned ones.

    An accelerator spreads over the unpinned operators after it, then over those before it; what remains is the host's.
    `before` and `after` are the nearest pinned operators at or before (after) each, -1 for none.
    """
    none = np.zeros((*pins.shape[:-1], 1), dtype=np.int8)
    padded = np.concatenate([pins, none], axis=-1)
    left, right = padded[..., before], padded[..., after]
    return np.where(left > 0, left, right)


def _nearest(pinned: Mask) -> tuple[Ints, Ints]:
    at = np.arange(len(pinned))
    before = np.maximum.accumulate(np.where(pinned, at, -1))
    after = np.minimum.accumulate(np.where(pinned, at, len(pinned))[::-1])[::-1]
    return before, np.where(after == len(pinned), -1, after)


def _small(op: Operator, small: Mapping[str, int]) -> int:
    if op.weight is None or op.is_target or op.op in _IGNORES_WEIGHT:
        return -1
    return small[op.weight]


def _cache_layer(op: Operator) -> int:
    """Layer whose KV cache holds the operator in place (the engine marks caches, see docs/architecture.md); else -1."""
    reads = op.op in _CACHE_READERS and op.weight is None
    if not op.touches_cache or not (reads or op.op in _CACHE_WRITERS):
        return -1
    for leaf in op.leaves:
        if match := _CACHE_LAYER.search(leaf):
            return int(match[1])
    return -1 if op.layer is None else op.layer


def _attention_layers(ops: tuple[Operator, ...]) -> list[int]:
    """Layer whose whole attention is charged to this operator: the fused one, or K*q of the unfused form; else -1."""
    layers = [-1] * len(ops)
    for layer, chain in attention_chains(ops).items():
        layers[chain[0]] = layer
    return layers
