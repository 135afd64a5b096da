"""The tensor data: random, reproducible, and made faster than a disk can write it.

One pool of encoded blocks per (ggml type, standard deviation) is filled from one stream of normal values; the tensors
of that kind are cut from it one after another, round and round. A pool that is used more than once has a prime number
of blocks, at least one for each row of its largest tensor: so no two rows of a tensor are equal, and tensors differ.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

# Here, not at first use: its compiled modules swallow a Ctrl-C while they load.
from numpy.random import default_rng

from .encoder import encode
from .tensors import TensorSpec

_POOL_VALUES = 1 << 24  # 32 MiB of F16
_PHASE = 1009  # shift between two pools' values; prime, so that their rows do not line up at any row width
_MAX_CHUNK = 16 << 20
# Tokens that are not text (control, unused, bytes) get small logits: random weights would otherwise end a generation,
# or print padding, at any point.
NON_TEXT_SCALE = 1.0 / 16.0


@dataclass
class _Pool:
    ggml_type: GGMLQuantizationType
    std: float
    n_blocks: int = 0  # in all tensors together, until the pool is sized
    max_rows: int = 0
    cursor: int = 0
    blocks: np.ndarray | None = None


class Weights:
    """Yields the bytes of each tensor; the tensors must be asked for in the order of specs."""

    def __init__(
        self, specs: Sequence[TensorSpec], types: Sequence[GGMLQuantizationType], text_tokens: np.ndarray, seed: int
    ) -> None:
        """text_tokens: [n_vocab] bool, whether a token is text; seed: a non-negative integer."""
        self._seed = seed
        self._runs = _runs(text_tokens)
        self._pools: dict[tuple[GGMLQuantizationType, float], _Pool] = {}
        for spec, kind in zip(specs, types, strict=True):
            for std, n_rows in self._segments(spec, kind):
                pool = self._pools.setdefault((kind, std), _Pool(kind, std))
                pool.n_blocks += n_rows * spec.ne[0] // GGML_QUANT_SIZES[kind][0]
                pool.max_rows = max(pool.max_rows, n_rows)
        for pool in self._pools.values():
            enough = max(_POOL_VALUES // GGML_QUANT_SIZES[pool.ggml_type][0], pool.max_rows)
            if pool.n_blocks > enough:
                pool.n_blocks = _next_prime(enough)
        self._values: np.ndarray | None = None

    def chunks(self, spec: TensorSpec, kind: GGMLQuantizationType, index: int) -> Iterator[memoryview]:
        """Yield the data of tensor number index in pieces of at most 16 MiB."""
        if spec.rows:
            yield from _given(spec, kind)
        elif kind == GGMLQuantizationType.F32:
            yield self._float32(spec, index).data.cast("B")
        for std, n_rows in self._segments(spec, kind):
            pool = self._pools[kind, std]
            if pool.blocks is None:
                self._fill(pool)
            yield from _cut(pool, n_rows * spec.ne[0] // GGML_QUANT_SIZES[kind][0])

    def _segments(self, spec: TensorSpec, kind: GGMLQuantizationType) -> list[tuple[float, int]]:
        if spec.rows or kind == GGMLQuantizationType.F32:
            return []
        if spec.zero_rows:
            return [(0.0, spec.zero_rows), (spec.std, spec.ne[1] - spec.zero_rows)] * (spec.n_rows // spec.ne[1])
        if not spec.logits:
            return [(spec.std, spec.n_rows)]
        return [(spec.std if is_text else spec.std * NON_TEXT_SCALE, length) for is_text, length in self._runs]

    def _float32(self, spec: TensorSpec, index: int) -> np.ndarray:
        if spec.values is not None:
            return np.array(spec.values, np.float32)
        rng = default_rng([self._seed, 1, index])
        data = rng.standard_normal(spec.n_rows * spec.ne[0], np.float32) * np.float32(spec.std) + np.float32(spec.mean)
        if spec.random_sign:
            data *= rng.choice(np.array([-1, 1], np.float32), len(data))
        return data

    def _fill(self, pool: _Pool) -> None:
        if self._values is None:
            most = max(p.n_blocks * GGML_QUANT_SIZES[p.ggml_type][0] for p in self._pools.values())
            rng = default_rng([self._seed, 0])
            self._values = rng.standard_normal(most + _PHASE * len(self._pools), np.float32)
        start = _PHASE * list(self._pools.values()).index(pool)
        n_values = pool.n_blocks * GGML_QUANT_SIZES[pool.ggml_type][0]
        pool.blocks = encode(pool.ggml_type, self._values[start : start + n_values], pool.std)


def _given(spec: TensorSpec, kind: GGMLQuantizationType) -> Iterator[memoryview]:
    assert spec.rows is not None
    step = max(1, _MAX_CHUNK // (4 * spec.ne[0]))
    for start in range(0, spec.n_rows, step):
        values = spec.rows(start, min(start + step, spec.n_rows))
        data = values if kind == GGMLQuantizationType.F32 else encode(kind, values.ravel(), 1.0)
        yield np.ascontiguousarray(data).data.cast("B")


def _cut(pool: _Pool, n_blocks: int) -> Iterator[memoryview]:
    assert pool.blocks is not None
    data, size = pool.blocks.data.cast("B"), pool.blocks.shape[1]
    while n_blocks:
        n = min(n_blocks, pool.n_blocks - pool.cursor, _MAX_CHUNK // size)
        yield data[pool.cursor * size : (pool.cursor + n) * size]
        pool.cursor = (pool.cursor + n) % pool.n_blocks
        n_blocks -= n


def _runs(mask: np.ndarray) -> list[tuple[bool, int]]:
    edges = np.flatnonzero(np.diff(mask)) + 1
    return [(bool(run[0]), len(run)) for run in np.split(mask, edges)]


def _next_prime(n: int) -> int:
    while n < 2 or any(n % d == 0 for d in range(2, int(n**0.5) + 1)):
        n += 1
    return n
