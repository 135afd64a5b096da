"""What part of a layer each rank computes. Heads and feed-forward columns are dealt out in whole pieces, so it is not
exactly its share. Pieces are llama.cpp's (`llama_meta_device_get_split_state`), where they end is csrc/ranks' rule.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from oallama.data.operators import OperatorGraph, TensorInfo
from oallama.engine import native

LEAST_COLUMNS = 128  # of the feed-forward, in a piece
FINE = 1 << 20  # values of what has no pieces that are known


@dataclass(frozen=True)
class Part:
    """of_layer: what this part is of a layer's weights. of_ranks: what of it each rank has. Shares of 1."""

    of_layer: float
    of_ranks: tuple[float, ...]


def layer_parts(graph: OperatorGraph, shares: Sequence[float]) -> tuple[Part, Part]:
    """Attention and feed-forward of a model's mean layer, for ranks with these shares of the model."""
    layered = [t for t in graph.tensors if t.layer is not None and t.layer < graph.n_layer]
    attention = sum(t.nbytes for t in layered if "attn" in t.kind)
    of_layer = attention / sum(t.nbytes for t in layered)
    heads, columns = divided(shares, *_queries(graph)), divided(shares, *_columns(graph))
    return Part(of_layer, heads), Part(1 - of_layer, columns)


def divided(shares: Sequence[float], n: int, piece: int) -> tuple[float, ...]:
    """Parts of `n` values in pieces of so many. In each layer another rank is the first that is given some."""
    n_ranks = len(shares)
    found = [0.0] * n_ranks
    for first in range(n_ranks):
        upto, begin = 0.0, 0
        for at in range(n_ranks):
            rank = (first + at) % n_ranks
            upto += shares[rank] / sum(shares)
            end = native.core().rank_boundary(upto, n, piece) if at < n_ranks - 1 else n
            found[rank] += (end - begin) / n / n_ranks
            begin = end
    return tuple(found)


def _queries(graph: OperatorGraph) -> tuple[int, int]:
    """Query heads that share a head of keys stay together, and a piece of the output matrix's rows is whole blocks."""
    for il, shape in enumerate(graph.attention):
        if shape and (output := graph.tensor.get(f"blk.{il}.attn_output.weight")):
            together = shape.n_head // max(1, shape.n_head_kv) * shape.head_dim_k
            return shape.n_head * shape.head_dim_k, math.lcm(together, _block(output))
    return FINE, 1


def _columns(graph: OperatorGraph) -> tuple[int, int]:
    down = next((t for t in graph.tensors if t.kind in ("ffn_down", "ffn_down_exps")), None)
    return (down.ne[0], math.lcm(LEAST_COLUMNS, _block(down))) if down else (FINE, 1)


def _block(weight: TensorInfo) -> int:
    return int(GGML_QUANT_SIZES[GGMLQuantizationType[weight.type.upper()]][0])
