"""One tier of the operator graph as arrays, and where its operators run under a placement.

llama.cpp's scheduler decides where operators without a weight run; `StageGraph.assign` follows its rules
(ggml_backend_sched_split_graph, passes 1 and 2), so transfers are counted where they really happen. Device ids: 0 is
the host, 1 the accelerator.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .operators import OUTPUT, Operator, OperatorGraph

# Upstream uploads host weights from this batch size on (op_offload_min_batch_size of ggml-cuda and ggml-vulkan).
OFFLOAD_MIN_TOKENS = 32
UNASSIGNED = -1
_CACHE_WRITERS = frozenset({"SET_ROWS", "CPY", "SET"})
# The scheduler does not place these by their (small) weight operand.
_IGNORES_WEIGHT = frozenset({"ROPE", "FLASH_ATTN_EXT"})
_CACHE_LAYER = re.compile(r"_l(\d+)\b")

Ids = NDArray[np.int8]
Mask = NDArray[np.bool_]
Ints = NDArray[np.intp]


@dataclass(frozen=True)
class Placement:
    """Homes as device ids, in the order of `CostModel.targets`, `CostModel.small` and the layers (output layer last).

    `upload` and `small_upload` mark host weights that may be uploaded for large batches.
    """

    targets: Ids
    upload: Mask
    small: Ids
    small_upload: Mask
    layers: Ids


class StageGraph:
    """The operators of one tier as arrays indexed by operator. Immutable after construction."""

    def __init__(self, graph: OperatorGraph, tier: int, targets: Mapping[str, int], small: Mapping[str, int]) -> None:
        """`targets` and `small` give every weight its position in a `Placement`."""
        self.tier = tier
        self.operators = graph.operators(tier)
        ops = self.operators
        self.target = np.array([targets[op.weight] if op.is_target and op.weight else -1 for op in ops], dtype=np.intp)
        self.small = np.array([_small(op, small) for op in ops], dtype=np.intp)
        self.gets_rows = np.array([op.op == "GET_ROWS" for op in ops], dtype=bool)
        self.is_output = np.array([op.weight == OUTPUT and op.is_target for op in ops], dtype=bool)
        self.cache_layer = np.array([_cache_layer(op) if op.op in _CACHE_WRITERS else -1 for op in ops], dtype=np.intp)
        self.attention_layer = np.array(_attention_layers(ops), dtype=np.intp)
        self.nbytes = np.array([op.nbytes_out for op in ops], dtype=np.float64)
        self.producer = np.array([p for op in ops for p in op.producers], dtype=np.intp)
        self.consumer = np.array([op.index for op in ops for _ in op.producers], dtype=np.intp)

    def tokens(self, n_tokens: int) -> Ints:
        """Tokens each operator processes when the stage runs with `n_tokens`; logits are computed for one token."""
        at_tier = np.array([op.n_tokens for op in self.operators], dtype=np.intp)
        tokens = np.where(at_tier == self.tier, n_tokens, np.minimum(at_tier, n_tokens))
        return np.where(self.is_output, 1, tokens)

    def bytes_out(self, n_tokens: int) -> NDArray[np.float64]:
        """Bytes of each operator's result when the stage runs with `n_tokens`."""
        one_row = np.array([op.nbytes_out / max(op.n_tokens, 1) for op in self.operators])
        return np.where(self.is_output, one_row, self.nbytes * (n_tokens / self.tier))

    def pins(self, placement: Placement, tokens: Ints) -> Ids:
        """Operators whose weight or KV cache decides where they run; the others are UNASSIGNED."""
        pinned = np.full(len(self.operators), UNASSIGNED, dtype=np.int8)
        large = tokens >= OFFLOAD_MIN_TOKENS
        at = self.small >= 0
        uploaded = large & ~self.gets_rows
        pinned[at] = placement.small[self.small[at]] | (placement.small_upload[self.small[at]] & uploaded[at])
        at = self.target >= 0
        pinned[at] = placement.targets[self.target[at]] | (placement.upload[self.target[at]] & large[at])
        at = self.cache_layer >= 0
        pinned[at] = placement.layers[self.cache_layer[at]]
        return pinned

    def assign(self, placement: Placement, tokens: Ints) -> Ids:
        """Device id of every operator, by the scheduler's rules.

        A weight pulls its operator to its home (or, if it may be uploaded and the batch is large, to the device);
        writes to the KV cache run where the cache is. The device then spreads over unassigned neighbours in execution
        order, downwards and upwards; what remains goes to whatever came before it, then after it.
        """
        ids = self.pins(placement, tokens)
        for device_only in (True, False):
            ids = _spread(ids, device_only)
            ids = _spread(ids[::-1], device_only)[::-1]
        return np.where(ids < 0, 0, ids).astype(np.int8)


def _spread(ids: Ids, device_only: bool) -> Ids:
    """Give unassigned operators the id of the last assigned one before them."""
    last = np.maximum.accumulate(np.where(ids >= 0, np.arange(len(ids)), -1))
    before = np.where(last >= 0, ids[last], UNASSIGNED)
    takes = (ids < 0) & (before > 0 if device_only else before >= 0)
    return np.where(takes, before, ids)


def _small(op: Operator, small: Mapping[str, int]) -> int:
    if op.weight is None or op.is_target or op.op in _IGNORES_WEIGHT:
        return -1
    return small[op.weight]


def _cache_layer(op: Operator) -> int:
    if not op.touches_cache:
        return -1
    for leaf in op.leaves:
        if match := _CACHE_LAYER.search(leaf):
            return int(match[1])
    return -1 if op.layer is None else op.layer


def _attention_layers(ops: tuple[Operator, ...]) -> list[int]:
    """Layer whose whole attention is charged to this operator: the fused one, or K*q of the unfused form; else -1."""
    layers, seen = [], set()
    for op in ops:
        fused = op.op == "FLASH_ATTN_EXT"
        unfused = op.op == "MUL_MAT" and op.weight is None and op.touches_cache
        layer = -1
        if (fused or unfused) and op.layer is not None and op.layer not in seen:
            layer = op.layer
            seen.add(layer)
        layers.append(layer)
    return layers
