"""Attention by numpy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

rng = np.random.default_rng(11)


def floats(*shape: int) -> np.ndarray:
    return rng.standard_normal(shape, dtype=np.float32)


class Reference:
    """Attention of one sequence in float64; K and V are kept as given."""

    def __init__(self) -> None:
        self.k: list[np.ndarray] = []
        self.v: list[np.ndarray] = []

    def attend(
        self,
        q: np.ndarray,
        k: np.ndarray,
        v: np.ndarray,
        scale: float,
        max_bias: float = 0.0,
        softcap: float = 0.0,
        sinks: np.ndarray | None = None,
    ) -> np.ndarray:
        first = len(self.k)
        self.k += list(k.astype(np.float64))
        self.v += list(v.astype(np.float64))
        all_k, all_v = np.array(self.k), np.array(self.v)
        n_head, group = q.shape[1], q.shape[1] // k.shape[1]
        out = np.zeros((*q.shape[:2], v.shape[2]))
        floor = 2 ** int(np.floor(np.log2(n_head)))
        for row in range(len(q)):
            for head in range(n_head):
                at = first + row
                scores = all_k[: at + 1, head // group] @ q[row, head] * scale
                if softcap:
                    scores = softcap * np.tanh(scores / softcap)
                if max_bias:
                    step = 2 ** (-max_bias / floor) if head < floor else 2 ** (-max_bias / 2 / floor)
                    slope = step ** (head + 1) if head < floor else step ** (2 * (head - floor) + 1)
                    scores = scores - slope * (at - np.arange(at + 1))
                top = max(scores.max(), sinks[head] if sinks is not None else -np.inf)
                weights = np.exp(scores - top)
                total = weights.sum() + (np.exp(sinks[head] - top) if sinks is not None else 0.0)
                out[row, head] = weights @ all_v[: at + 1, head // group] / total
        return out


class Step(NamedTuple):
    """Rows of several sequences in one layer, after those of the steps before."""

    layer: int
    rows: list[tuple[int, int, int]]  # sequence, its first row, number of rows
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    expected: np.ndarray


def steps(
    chunks: Sequence[Sequence[int]],
    n_layers: int,
    n_head: int,
    n_head_kv: int,
    d_k: int,
    d_v: int,
    options: dict[str, Any],
    scale: float = 0.1,
) -> Iterator[Step]:
    """Sequences of random rows; `chunks`: of each step, the rows of every sequence."""
    references = [[Reference() for _ in chunks[0]] for _ in range(n_layers)]
    positions = [0 for _ in chunks[0]]
    for counts in chunks:
        n = sum(counts)
        rows = [(at, positions[at], count) for at, count in enumerate(counts) if count]
        for layer in range(n_layers):
            q, k, v = floats(n, n_head, d_k), floats(n, n_head_kv, d_k), floats(n, n_head_kv, d_v)
            expected, first = [], 0
            for at, _, count in rows:
                part = slice(first, first + count)
                expected.append(references[layer][at].attend(q[part], k[part], v[part], scale, **options))
                first += count
            yield Step(layer, rows, q, k, v, np.concatenate(expected))
        positions = [p + count for p, count in zip(positions, counts, strict=True)]
