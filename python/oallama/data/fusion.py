"""Chains of operators that a backend computes at once: where they are in a graph, and what they take in one piece.

ggml-cuda fuses a norm with its multiplication, RoPE with the write to the KV cache, and in decode gate, up and GLU of a
feed-forward (ggml-cuda.cu, ggml_cuda_can_fuse). Priced one by one such operators look slower than they are. A chain
whose operators a plan puts on different devices is not fused: then the prices of its parts hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .entries import FEED_FORWARD, NORM, ROPE_STORE
from .operators import Operator, OperatorGraph

Ints = NDArray[np.intp]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Chain:
    """Neighbouring operators (positions in a tier's graph). type and ne: what their time depends on, see ChainTime."""

    kind: str
    ops: tuple[int, ...]
    type: str
    ne: tuple[int, int]


@dataclass(frozen=True)
class Fusion:
    """Chains of one length in one stage.

    ops: (chains, length) operators. gain: (chains, devices) seconds to add, below zero where one piece is faster.
    """

    ops: Ints
    gain: Floats

    def at(self, chosen: NDArray[np.bool_], columns: Ints) -> Fusion:
        """Some of the chains, their operators at other positions."""
        return Fusion(columns, self.gain[chosen])

    def ending(self, first: int, end: int) -> bytes:
        """What tells apart segments of one structure: the gains of the chains that end in [first, end)."""
        return self.gain[(self.ops[:, -1] >= first) & (self.ops[:, -1] < end)].tobytes()

    def seconds(self, ids: NDArray[np.int8]) -> Floats:
        """(placements,) seconds to add for device ids (placements, columns)."""
        where = ids[:, self.ops]
        together = (where == where[:, :, :1]).all(axis=2)
        return np.where(together, self.gain[np.arange(len(self.ops)), where[:, :, 0]], 0.0).sum(axis=1)


def chains(graph: OperatorGraph, tier: int, type_k: str) -> list[Chain]:
    """The chains of one tier; type_k is the K cache's type."""
    key = ("chains", tier, type_k)
    if key not in graph.derived:
        ops = graph.operators(tier)
        found = (_chain(graph, ops, i, tier, type_k) for i in range(len(ops)))
        graph.derived[key] = [chain for chain in found if chain is not None]
    return list(graph.derived[key])


def _chain(graph: OperatorGraph, ops: Sequence[Operator], i: int, tier: int, type_k: str) -> Chain | None:
    op, before = ops[i], ops[i - 1] if i else None
    if before is None or before.index not in op.producers:
        return None
    if op.op == "MUL" and op.weight and before.op == "RMS_NORM":
        rows = int(np.prod(op.ne[1:]))
        return Chain(NORM, (i - 1, i), "f32", (op.ne[0], rows // (tier if rows >= tier else 1)))
    if op.op == "SET_ROWS" and before.op == "ROPE":
        return Chain(ROPE_STORE, (i - 1, i), type_k, (before.ne[0], before.ne[1]))
    if op.op == "GLU" and i > 1 and {ops[i - 2].index, before.index} == {*op.producers}:
        pair = (ops[i - 2], before)
        weights = [graph.tensor[p.weight or ""] for p in pair if p.is_target and p.op == "MUL_MAT"]
        alike = len(weights) == 2 and weights[0].ne == weights[1].ne and weights[0].type == weights[1].type
        if alike and pair[0].producers == pair[1].producers:
            k, m = weights[0].ne[:2]
            return Chain(FEED_FORWARD, (i - 2, i - 1, i), weights[0].type, (k, m))
    return None
