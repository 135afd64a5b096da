"""Weights, columns and mixtures for tests of our products, computed by the engine and in float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import gguf
import numpy as np

from oallama.engine import native

Array = np.ndarray[Any, Any]


def weight_of(type: str, n_rows: int, k: int, seed: int) -> Array:
    """Blocks of any bytes, and scales as models have them; of f32 and f16 values."""
    kind = gguf.GGMLQuantizationType[type.upper()]
    values, nbytes = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(seed)
    if type in ("f32", "f16"):
        return rng.normal(size=(n_rows, k)).astype({"f32": np.float32, "f16": np.float16}[type]).view(np.uint8)
    blocks = rng.integers(0, 256, (n_rows, k // values, nbytes), dtype=np.uint8)
    scales = {"q4_0": [0], "q8_0": [0], "mxfp4": [], "q4_K": [0, 2], "q6_K": [208]}[type]
    for at in scales:
        halves = rng.uniform(0.002, 0.02, (n_rows, k // values, 1)).astype(np.float16)
        blocks[:, :, at : at + 2] = halves.view(np.uint8)
    if type == "mxfp4":
        blocks[:, :, 0] = rng.integers(110, 125, blocks.shape[:2])
    return blocks.reshape(n_rows, -1)


def columns_of(n: int, k: int, seed: int, n_sequences: int = 1) -> Array:
    rng = np.random.default_rng(seed + 1)
    return rng.normal(size=(n_sequences, n, k)).astype(np.float32)


def whole_columns(n: int, k: int, seed: int) -> Array:
    """Columns that lose nothing as bytes: each block has the largest one."""
    columns = np.random.default_rng(seed).integers(-127, 128, (1, n, k)).astype(np.float32)
    columns[:, :, ::32] = 127
    return columns


def computed(weight: Array, type: str, columns: Array, n_threads: int = 1, marked: bool = True) -> dict[str, Any]:
    return dict(native.core().multiply(weight, type, columns, n_threads=n_threads, marked=marked))


def reference(weight: Array, type: str, columns: Array) -> Array:
    values = gguf.quants.dequantize(weight, gguf.GGMLQuantizationType[type.upper()])
    return np.asarray(columns.astype(np.float64) @ values.astype(np.float64).T)


def assert_sums(found: Array, weight: Array, type: str, columns: Array) -> None:
    """Each sum is off by no more than 1e-6 of its terms' sizes: what rounding leaves where terms cancel out, too."""
    values = gguf.quants.dequantize(weight, gguf.GGMLQuantizationType[type.upper()])
    terms = np.abs(columns.astype(np.float64)) @ np.abs(values.astype(np.float64)).T
    off = np.abs(found - reference(weight, type, columns))
    assert (off <= 1e-6 * terms).all(), f"off by {(off / terms).max():.1e} of the terms' sizes"


def error(found: Array, exact: Array) -> float:
    return float(np.sqrt(np.mean((found - exact) ** 2) / np.mean(exact**2)))


@dataclass(frozen=True)
class Mixture:
    """Tokens and the experts they choose. slots: columns of a token, one for all of its experts or one for each."""

    type: str
    n_tokens: int
    n_experts: int
    n_used: int
    slots: int
    n_rows: int = 45
    k: int = 512
    skewed: bool = False  # to the first experts; some have none

    def operands(self) -> dict[str, Any]:
        rng = np.random.default_rng(3)
        most = self.n_experts // 2 if self.skewed else self.n_experts
        ids = np.stack([rng.permutation(most)[: self.n_used] for _ in range(self.n_tokens)]).astype(np.int32)
        return {
            "weight": weight_of(self.type, self.n_experts * self.n_rows, self.k, 1),
            "type": self.type,
            "columns": rng.normal(size=(self.n_tokens, self.slots, self.k)).astype(np.float32),
            "ids": ids,
            "n_experts": self.n_experts,
        }

    def reference(self, given: dict[str, Any]) -> Array:
        values = gguf.quants.dequantize(given["weight"], gguf.GGMLQuantizationType[self.type.upper()])
        matrices = values.astype(np.float64).reshape(self.n_experts, self.n_rows, self.k)[given["ids"]]
        columns = np.repeat(given["columns"].astype(np.float64), self.n_used // self.slots, axis=1)
        return np.asarray(np.einsum("tumk,tuk->tum", matrices, columns))
