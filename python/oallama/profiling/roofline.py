"""Rooflines: the time of every operator of a model on a device of which only the peaks are known. Pure functions.

An operator takes the longer of moving its bytes and doing its arithmetic, plus a fixed cost. Bytes are weights (in
their quantised size), cache rows and activations, each moved once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ..data.entries import OTHER, AttentionTime, LinkTime, OperatorTime, ShapeTime
from ..data.operators import AttentionShape, OperatorGraph
from .workload import LINK_SIZES, SMALL_OP_TIERS, UNFUSED_V_TYPES

# Bytes per value of the KV cache types: block bytes / block values of ggml.
CACHE_BYTES = {
    "f32": 4.0, "f16": 2.0, "bf16": 2.0, "q8_0": 34 / 32, "q5_1": 24 / 32, "q5_0": 22 / 32, "q4_1": 20 / 32,
    "q4_0": 18 / 32, "iq4_nl": 18 / 32,
}  # fmt: skip
_F32 = 4
# An addition reads two rows and writes one; norms, rope and activations move about as much.
_SMALL_OP_ROWS = 3


@dataclass(frozen=True)
class Roofline:
    """A device's reachable bytes/s and flop/s, and the fixed seconds of every operator."""

    bytes_s: float
    flops: float
    overhead_s: float

    def seconds(self, nbytes: float, flops: float) -> float:
        """max(nbytes / bytes_s, flops / flop/s) + overhead."""
        return max(nbytes / self.bytes_s, flops / self.flops) + self.overhead_s


# Of a weight's type and shape (k, m, ..).
RooflineOf = Callable[[str, tuple[int, ...]], Roofline]


def targets(graph: OperatorGraph, device: str, roofline_of: RooflineOf) -> Iterator[OperatorTime]:
    """Target operators at the graph's token counts and the powers of two between: both sides of the roofline's bend.

    Bytes: the weights of the active experts, the rows in and out. Flops: a multiplication and an addition per weight
    and row.
    """
    counts: dict[tuple[str, str, tuple[int, int, int], int], set[int]] = {}
    weight_bytes: dict[tuple[str, tuple[int, int, int]], float] = {}
    for tier in graph.tiers:
        for op in graph.targets(tier):
            tensor = graph.tensor[op.weight or ""]
            k, m, n_expert = (*tensor.ne, 1, 1)[:3]
            ne = (k, m, n_expert)
            weight_bytes[tensor.type, ne] = tensor.nbytes / n_expert
            counts.setdefault((op.op, tensor.type, ne, op.n_used), set()).add(op.n_tokens)
    for (name, kind, ne, n_used), tokens in counts.items():
        k, m, n_expert = ne
        roofline = roofline_of(kind, ne)
        for n in _with_powers_of_two(tokens):
            # A batched weight (one matrix per head) is read whole; of experts only those that some token chose.
            active = min(n_expert, n * n_used) if name == "MUL_MAT_ID" else n_expert
            rows = n * (n_used if name == "MUL_MAT_ID" else n_expert)
            nbytes = weight_bytes[kind, ne] * active + _F32 * rows * (k + m)
            yield OperatorTime(device, name, kind, ne, n_used, n, roofline.seconds(nbytes, 2.0 * k * m * rows))


def _with_powers_of_two(tokens: set[int]) -> list[int]:
    low, high = min(tokens), max(tokens)
    return sorted(tokens | {2**i for i in range(high.bit_length()) if low < 2**i < high})


def small_operators(graph: OperatorGraph, device: str, roofline: Roofline) -> Iterator[OperatorTime]:
    """One operator without a weight matrix on rows of n_embd values."""
    n_embd = graph.tensor["token_embd.weight"].ne[0]
    for n in SMALL_OP_TIERS:
        seconds = roofline.seconds(_SMALL_OP_ROWS * _F32 * n_embd * n, 0.0)
        yield OperatorTime(device, OTHER, "f32", (n_embd, 1, 1), 1, n, seconds)


def shaped_operators(graph: OperatorGraph, device: str, roofline: Roofline) -> Iterator[ShapeTime]:
    """Operators that are timed by kind and shape. Bytes: what they read and write; of products the arithmetic too."""
    ops = (op for tier in (min(graph.tiers), max(graph.tiers)) for op in graph.operators(tier))
    found = {op.shape.key: (op.shape.nbytes, op.flops) for op in ops if op.shape is not None}
    for key, (nbytes, flops) in found.items():
        yield ShapeTime(device, key, roofline.seconds(nbytes, flops))


def attention(
    graph: OperatorGraph, device: str, roofline: Roofline, type_k: str, type_v: str, depths: Sequence[int]
) -> Iterator[AttentionTime]:
    """Bytes: the cache of all KV heads, once. Unfused: the scores are written by K*q, softmaxed and read by V*p too."""
    tokens = _with_powers_of_two({*graph.tiers})
    for shape in {s: None for s in graph.attention if s is not None}:
        for n in tokens:
            for depth in sorted({max(depth, n) for depth in depths}):
                cache = _cache_bytes(shape, depth, type_k, type_v)
                flops = 2.0 * n * depth * shape.n_head * (shape.head_dim_k + shape.head_dim_v)
                fused = roofline.seconds(cache, flops)
                yield AttentionTime(device, *shape, type_k, type_v, n, depth, fused, flash=True)
                if type_v in UNFUSED_V_TYPES:
                    scores = _F32 * n * depth * shape.n_head
                    parts = (roofline.seconds(cache + 2 * scores, flops), roofline.seconds(2 * scores, 0.0))
                    seconds = sum(parts) + roofline.overhead_s
                    yield AttentionTime(device, *shape, type_k, type_v, n, depth, seconds, flash=False)


def _cache_bytes(shape: AttentionShape, depth: int, type_k: str, type_v: str) -> float:
    per_head = shape.head_dim_k * CACHE_BYTES[type_k] + shape.head_dim_v * CACHE_BYTES[type_v]
    return depth * shape.n_head_kv * per_head


def links(device: str, latency_s: float, bytes_s: Mapping[str, float]) -> Iterator[LinkTime]:
    """Copies both ways: latency + bytes / bytes_s. `bytes_s` by the host's memory, "pageable" and "pinned"."""
    for memory, rate in bytes_s.items():
        for direction in ("h2d", "d2h"):
            for nbytes in LINK_SIZES:
                yield LinkTime(device, direction, memory, nbytes, latency_s + nbytes / rate)
