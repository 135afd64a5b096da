"""Bytes of KV caches, by the shapes of attention."""

from __future__ import annotations

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from ..data.operators import AttentionShape


def cache_nbytes(shape: AttentionShape, rows: int, type_k: str, type_v: str) -> tuple[float, float]:
    """Bytes of one layer's K and V for so many positions, in caches of these types."""
    values = rows * shape.n_head_kv
    return values * shape.head_dim_k * _value_nbytes(type_k), values * shape.head_dim_v * _value_nbytes(type_v)


def _value_nbytes(type: str) -> float:
    block, size = GGML_QUANT_SIZES[GGMLQuantizationType[type.upper()]]
    return float(size) / float(block)
