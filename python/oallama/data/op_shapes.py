"""Operators that are timed by kind and shape: neither a product with a weight nor attention, and perhaps not small.

Scans, convolutions, sorting, products of activations and wide activations may take more than 1 % of a pass. Which of
them might is decided here, from the graph alone; what they take is measured on the operator rebuilt from the graph
(csrc/probe/bench_nodes.cpp). All others count as small operators.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

# Of a pass: what a kind and shape may cost at most to count as small.
NEGLIGIBLE = 0.01
# What a pass costs is counted in bytes. Devices do about this many multiplications and additions per byte they read.
FLOPS_PER_BYTE = 20.0
# These do so much per byte that their bytes do not tell.
COSTLY = frozenset(
    {
        "MUL_MAT", "MUL_MAT_ID", "OUT_PROD", "SOLVE_TRI", "ARGSORT", "TOP_K", "CUMSUM", "SSM_SCAN", "GATED_DELTA_NET",
        "GATED_LINEAR_ATTN", "RWKV_WKV6", "RWKV_WKV7", "LIGHTNING_INDEXER", "DSV4_HC_COMB", "DSV4_HC_PRE",
        "DSV4_HC_POST",
    }
)  # fmt: skip
# Tables and caches are rebuilt with as many rows: what is read of them is far less.
MAX_ROWS = 4096
# Kinds within a kind, by their first parameter.
_BY_PARAMETER = frozenset({"UNARY", "GLU"})


class Source(NamedTuple):
    """What an operator reads; `ne` and `nb` (strides in bytes) as in ggml. cold: every layer has its own."""

    type: str
    ne: tuple[int, ...]
    nb: tuple[int, ...]
    cold: bool


@dataclass(frozen=True)
class OpShape:
    """An operator of ggml with all that its time depends on.

    op_params: ggml's, as whole numbers. view_of: the source that the result is written to, -1 for memory of its own.
    """

    op: str
    op_params: tuple[int, ...]
    type: str
    ne: tuple[int, ...]
    sources: tuple[Source, ...]
    view_of: int = -1

    @property
    def key(self) -> str:
        """What has equal times, readable: a source that is not contiguous has a mark.

        >>> shape.key
        'SSM_CONV f32[8192x1] f32[3x8192~] f32[4x8192]'
        """
        kind = f"{self.op}/{self.op_params[0]}" if self.op in _BY_PARAMETER and self.op_params else self.op
        sources = (_text(s.type, s.ne, "" if _is_contiguous(s) else "~") for s in self.sources)
        return " ".join([kind, _text(self.type, self.ne), *sources])

    @property
    def nbytes(self) -> float:
        """Bytes that are read and written; of tables and caches the rows alone."""
        out = values_nbytes(self.type, self.ne)
        if self.op == "GET_ROWS":
            return 2 * out
        if self.op == "SET_ROWS":
            return 2 * values_nbytes(self.sources[0].type, self.sources[0].ne)
        return out + sum(values_nbytes(s.type, s.ne) for i, s in enumerate(self.sources) if i != self.view_of)

    def as_node(self) -> dict[str, Any]:
        """What `OpBench.node` takes."""
        sources = [{"type": s.type, "ne": list(s.ne), "nb": list(s.nb), "cold": s.cold} for s in self.sources]
        return {
            "op": self.op,
            "op_params": list(self.op_params),
            "type": self.type,
            "ne": list(self.ne),
            "sources": sources,
            "view_of": self.view_of,
        }

    @classmethod
    def make(cls, node: Mapping[str, Any], reads: Sequence[Mapping[str, Any]], cold: Sequence[bool]) -> OpShape | None:
        """From a raw node and the raw tensors it reads; None where strides are not told, or nothing is computed."""
        if any("nb" not in tensor for tensor in reads) or 0 in node["ne"]:
            return None
        sources = [Source(t["type"], tuple(t["ne"]), tuple(t["nb"]), c) for t, c in zip(reads, cold, strict=True)]
        ne, op = tuple(node["ne"]), node["op"]
        if op == "GET_ROWS":
            sources[0] = _first_rows(sources[0])
        if op == "SET_ROWS" and len(sources) > 2 and ne[1] > MAX_ROWS:
            sources[2], ne = _first_rows(sources[2]), (ne[0], MAX_ROWS, *ne[2:])
        return cls(op, tuple(node.get("op_params", ())), node["type"], ne, tuple(sources), node.get("view_of", -1))

    @classmethod
    def from_json(cls, content: Mapping[str, Any] | None) -> OpShape | None:
        """Read what `dataclasses.asdict` made. Raises KeyError, TypeError, ValueError for anything else."""
        if content is None:
            return None
        fields: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in content.items()}
        fields["sources"] = tuple(Source(t, tuple(ne), tuple(nb), cold) for t, ne, nb, cold in content["sources"])
        return cls(**fields)


class Part(NamedTuple):
    """An operator of a pass, by what it costs in bytes; shape: None for products with weights and attention."""

    shape: OpShape | None
    cost: float


def worth_timing(ops: Iterable[Part]) -> set[str]:
    """Keys of the shapes that may cost more than `NEGLIGIBLE` of the pass that these operators are."""
    total, by_key = 0.0, defaultdict[str, float](float)
    costly = set()
    for shape, cost in ops:
        total += cost
        if shape is not None:
            by_key[shape.key] += cost
            if shape.op in COSTLY:
                costly.add(shape.key)
    return costly | {key for key, cost in by_key.items() if cost > NEGLIGIBLE * total}


def values_nbytes(type: str, ne: Sequence[int]) -> float:
    """Bytes of so many values, whatever lies between them."""
    block, size = _sizes(type)
    return math.prod(ne) * size / block


def _sizes(type: str) -> tuple[int, int]:
    return GGML_QUANT_SIZES[GGMLQuantizationType[type.upper()]]


def _first_rows(table: Source) -> Source:
    if table.ne[1] <= MAX_ROWS or table.ne[2] > 1:
        return table
    rows = (table.ne[0], MAX_ROWS, *table.ne[2:])
    nb = (*table.nb[:2], table.nb[1] * MAX_ROWS, table.nb[1] * MAX_ROWS)
    return table._replace(ne=rows, nb=nb)


def _is_contiguous(source: Source) -> bool:
    block, size = _sizes(source.type)
    expected = size
    for i, (n, stride) in enumerate(zip(source.ne, source.nb, strict=True)):
        if n > 1 and stride != expected:
            return False
        expected = expected * (n // block) if i == 0 else expected * n
    return True


def _text(type: str, ne: Sequence[int], mark: str = "") -> str:
    last = max((i for i, n in enumerate(ne) if n != 1), default=0)
    return f"{type}[{'x'.join(map(str, ne[: last + 1]))}{mark}]"
