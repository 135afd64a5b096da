"""How much alike measured shapes are, and how times scale between them. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Sequence

Shape = tuple[int, int, int, int]  # k, m, n_expert, n_used; of attention: its heads


def n_active(shape: Shape, n_tokens: int) -> int:
    """Experts whose weights are read for `n_tokens` tokens (1 for a dense weight)."""
    return min(shape[2], max(1, n_tokens) * shape[3])


def work(shape: Shape, n_tokens: int) -> float:
    """Weight values touched: proportional to bytes when memory-bound, to flops at equal tokens when compute-bound."""
    return float(shape[0]) * shape[1] * n_active(shape, n_tokens)


def distance(a: Shape, b: Shape) -> float:
    """How unlike two shapes are."""
    return sum(abs(math.log(x / y)) for x, y in zip(a, b, strict=True))


def attention_work(shape: Sequence[int]) -> float:
    """Values of the heads (n_head, n_head_kv, head_dim_k, head_dim_v) that a position in the cache costs."""
    n_head, n_head_kv, head_dim_k, head_dim_v = shape
    # Decode reads n_head_kv heads, prefill multiplies n_head of them: the geometric mean serves both.
    return math.sqrt(n_head * n_head_kv) * (head_dim_k + head_dim_v)


def attention_distance(
    a: tuple[Shape, str, str, bool], b: tuple[tuple[int, ...], str, str, bool]
) -> tuple[bool, bool, float, Shape]:
    """How unlike two measured attentions are (heads, types of K and V, fused), as a key to sort by."""
    return (a[3] != b[3], a[1:] != b[1:], abs(math.log(attention_work(a[0]) / attention_work(b[0]))), a[0])
