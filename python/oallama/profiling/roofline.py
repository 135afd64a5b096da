"""Rooflines: the time of every operator of a model on a device of which only the peaks are known. Pure functions.

An operator takes the longer of moving its bytes and doing its arithmetic, plus a fixed cost. Bytes are weights (in
their quantised size), cache rows and activations, each moved once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..data.entries import OTHER, AttentionTime, LinkTime, OperatorTime, ShapeTime
from ..data.operators import AttentionShape, OperatorGraph
from .workload import LINK_SIZES, SMALL_OP_TIERS, UNFUSED_V_TYPES, token_counts

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
            counts.setdefault((op.op, tensor.type, ne, op.n_used), set()).update(token_counts(graph, op, tier))
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


@dataclass(frozen=True)
class Attention:
    """One layer's attention of `n_tokens` queries over `depth` cached positions."""

    shape: AttentionShape
    type_k: str
    type_v: str
    n_tokens: int
    depth: int

    @property
    def cache_bytes(self) -> float:
        """The cache of all KV heads, once."""
        shape = self.shape
        per_head = shape.head_dim_k * CACHE_BYTES[self.type_k] + shape.head_dim_v * CACHE_BYTES[self.type_v]
        return self.depth * shape.n_head_kv * per_head

    @property
    def flops(self) -> float:
        """Products of all query heads with K and with V."""
        return 2.0 * self.n_tokens * self.depth * self.shape.n_head * (self.shape.head_dim_k + self.shape.head_dim_v)


class FormTime(NamedTuple):
    """Seconds of one form of attention; kernel: of KERNELS."""

    kernel: str
    flash: bool
    seconds: float


def attention_times(work: Attention, roofline: Roofline) -> Iterator[FormTime]:
    """By rooflines alone. Unfused: the scores are written by K*q, softmaxed and read by V*p too."""
    yield FormTime("ggml", True, roofline.seconds(work.cache_bytes, work.flops))
    if work.type_v in UNFUSED_V_TYPES:
        scores = _F32 * work.n_tokens * work.depth * work.shape.n_head
        parts = (roofline.seconds(work.cache_bytes + 2 * scores, work.flops), roofline.seconds(2 * scores, 0.0))
        yield FormTime("ggml", False, sum(parts) + roofline.overhead_s)


def attention(
    graph: OperatorGraph,
    device: str,
    times: Callable[[Attention], Iterable[FormTime]],
    type_k: str,
    type_v: str,
    depths: Sequence[int],
) -> Iterator[AttentionTime]:
    """Attention at the graph's token counts and the powers of two between, at depths of at least as many rows."""
    tokens = _with_powers_of_two({*graph.tiers})
    for shape in {s: None for s in graph.attention if s is not None}:
        for n in tokens:
            for depth in sorted({max(depth, n) for depth in depths}):
                for kernel, flash, seconds in times(Attention(shape, type_k, type_v, n, depth)):
                    heads = (*shape, type_k, type_v)
                    yield AttentionTime(device, *heads, n, depth, seconds, flash=flash, kernel=kernel)


def links(device: str, latency_s: float, bytes_s: Mapping[str, float]) -> Iterator[LinkTime]:
    """Copies both ways: latency + bytes / bytes_s. `bytes_s` by the host's memory, "pageable" and "pinned"."""
    for memory, rate in bytes_s.items():
        for direction in ("h2d", "d2h"):
            for nbytes in LINK_SIZES:
                yield LinkTime(device, direction, memory, nbytes, latency_s + nbytes / rate)
