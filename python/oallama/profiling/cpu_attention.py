"""Attention on a CPU one does not have: shares of the peaks that kernels reached on a CPU that was measured.

A cell is one measured attention: a kernel, a form, a cache type, heads, query tokens and a depth. It has two shares. K
and V are read once; at few tokens that takes a share of the rate of reading memory. Products take a share of the CPU's
peak, its cores, clock and vectors. One time does not say which of the two bound it. So on another CPU

    seconds = max(bytes / (read rate * the best share any kernel reached), flops / (peak * the cell's share))

A kernel that was far from the rate of memory scales with the cores, one that reached it with the memory.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from ..base.jsonfile import read_json_object
from ..data.curves import log_log
from ..data.entries import KERNELS
from ..data.shipped import HERE, find
from ..errors import OallamaError
from .parts import build_part
from .roofline import CACHE_BYTES, Attention, FormTime, Roofline
from .workload import UNFUSED_V_TYPES

SCHEMA = "oallama.attention/1"
FOLDER = HERE / "attention"
# Two cores of an EPYC with AVX-512.
SHIPPED = "epyc-2-cores"
# Our kernels: `type_of` and `widest` in csrc/attend/own_attention.cpp.
_OWN_TYPES, _OWN_WIDTH = ("f32", "f16", "bf16", "q8_0", "q4_0"), 16
_WHOLE_TYPES = ("f32", "f16", "bf16")
# Unfused attention is K*q, softmax and V*p.
_UNFUSED_OPERATORS = 3
Form = tuple[str, bool]  # kernel, fused
FORMS: tuple[Form, ...] = (("ggml", True), ("ggml", False), ("oallama", True))


@dataclass(frozen=True)
class Cell:
    """One measured attention; K and V have the same type and width.

    bandwidth_efficiency: K and V read once, as a share of the machine's rate of reading memory. compute_efficiency: all
    products of tokens and depth, as a share of the peak fp32 flop/s.
    """

    kernel: str
    flash: bool
    type: str
    n_head: int
    n_head_kv: int
    head_dim: int
    n_tokens: int
    depth: int
    bandwidth_efficiency: float
    compute_efficiency: float


@dataclass(frozen=True)
class AttentionEfficiencies:
    """What kernels reach; source: the file of measurements, measured_on: the CPU."""

    name: str
    source: str
    measured_on: str
    cells: tuple[Cell, ...]

    @classmethod
    def load(cls, source: str | Path) -> AttentionEfficiencies:
        """Read a file of efficiencies: the name of a shipped one, or a path.

        Raises OallamaError when there is none of that name, and for a file that is corrupt, of another version, or has
        cells that no kernel can have measured.
        """
        path = find(source, FOLDER, "file of attention efficiencies")
        content = read_json_object(path, "attention efficiencies", f"start from a shipped file in {FOLDER}")
        try:
            if content.get("schema") != SCHEMA:
                raise ValueError(f"schema is not {SCHEMA!r}")
            texts = {key: content[key] for key in ("name", "source", "measured_on")}
            if wrong := [key for key, text in texts.items() if not isinstance(text, str) or not text]:
                raise ValueError(f"{wrong[0]} is {texts[wrong[0]]!r}, expected a text")
            cells = tuple(build_part(Cell, row, f"cells[{i}]") for i, row in enumerate(content["cells"]))
            _check(cells)
            return cls(**texts, cells=cells)
        except KeyError as e:
            raise OallamaError(f"attention efficiencies {path} have no {e}; see the shipped ones in {FOLDER}") from None
        except (TypeError, ValueError) as e:
            raise OallamaError(f"attention efficiencies {path}: {e}; see the shipped ones in {FOLDER}") from None

    def describe(self) -> str:
        """Where its shares are from, in a line."""
        return f"priced by what kernels reached of the peaks of {self.measured_on}: {self.source}"

    def times(self, work: Attention, peaks: Roofline) -> Iterator[FormTime]:
        """Seconds of each form and kernel that the heads and the cache allow.

        peaks: of the CPU: bytes/s that memory can be read at, peak flop/s.
        """
        for form in FORMS:
            if form in self._tables and _allowed(form, work):
                # A cache of two types is no faster than the slower of them.
                seconds = max(self._seconds(form, kind, work, peaks) for kind in {work.type_k, work.type_v})
                yield FormTime(*form, seconds)

    def _seconds(self, form: Form, type: str, work: Attention, peaks: Roofline) -> float:
        tables = self._tables[form]
        kind = min(tables, key=lambda known: (known != type, _is_whole(known) != _is_whole(type), known))
        heads = min(tables[kind], key=lambda known: _distance(known, work))
        share = _share(tables[kind][heads], work.n_tokens, work.depth)
        reached = Roofline(peaks.bytes_s * self._best[kind], peaks.flops * share, 0.0)
        operators = 1 if form[1] else _UNFUSED_OPERATORS
        return reached.seconds(work.cache_bytes, work.flops) + operators * peaks.overhead_s

    @cached_property
    def _best(self) -> dict[str, float]:
        """By type of the cache the best share of the rate of reading memory."""
        best: dict[str, float] = {}
        for cell in self.cells:
            best[cell.type] = max(best.get(cell.type, 0.0), cell.bandwidth_efficiency)
        return best

    @cached_property
    def _tables(self) -> dict[Form, dict[str, dict[Heads, Grid]]]:
        """By form, type, heads, tokens and depth the share of the peak."""
        tables: dict[Form, dict[str, dict[Heads, Grid]]] = {}
        for cell in self.cells:
            by_heads = tables.setdefault((cell.kernel, cell.flash), {}).setdefault(cell.type, {})
            grid = by_heads.setdefault((cell.n_head, cell.n_head_kv, cell.head_dim), defaultdict(dict))
            grid[cell.n_tokens][cell.depth] = cell.compute_efficiency
        return tables


Heads = tuple[int, int, int]  # of queries, of K and V, their width
Grid = dict[int, dict[int, float]]  # by tokens and depth


def _check(cells: Sequence[Cell]) -> None:
    seen = set()
    for i, cell in enumerate(cells):
        if cell.kernel not in KERNELS:
            raise ValueError(f"cells[{i}].kernel is {cell.kernel!r}, expected one of {', '.join(KERNELS)}")
        if (cell.kernel, cell.flash) not in FORMS:
            raise ValueError(f"cells[{i}] is unfused and of {cell.kernel}, which has fused attention alone")
        if cell.type not in CACHE_BYTES:
            raise ValueError(f"cells[{i}].type is {cell.type!r}, expected one of {', '.join(CACHE_BYTES)}")
        if cell.n_head % cell.n_head_kv:
            raise ValueError(f"cells[{i}].n_head is {cell.n_head}, expected a multiple of n_head_kv")
        key = replace(cell, bandwidth_efficiency=1.0, compute_efficiency=1.0)
        if key in seen:
            raise ValueError(f"cells[{i}] was there before")
        seen.add(key)
    if not any((cell.kernel, cell.flash) == FORMS[0] for cell in cells):
        raise ValueError("cells has none of ggml's fused attention")


def _allowed(form: Form, work: Attention) -> bool:
    if form == ("ggml", False):
        return work.type_v in UNFUSED_V_TYPES
    if form == ("oallama", True):
        widths = (work.shape.head_dim_k, work.shape.head_dim_v)
        return {work.type_k, work.type_v} <= {*_OWN_TYPES} and not any(width % _OWN_WIDTH for width in widths)
    return True


def _is_whole(type: str) -> bool:
    return type in _WHOLE_TYPES


def _distance(heads: Heads, work: Attention) -> float:
    """How unlike heads are in what kernels reach: by how many share K and V, and by width."""
    n_head, n_head_kv, head_dim = heads
    shared = work.shape.n_head / work.shape.n_head_kv
    return abs(math.log(shared * n_head_kv / n_head)) + abs(math.log(work.shape.head_dim_k / head_dim))


def _share(grid: Mapping[int, Mapping[int, float]], n_tokens: int, depth: int) -> float:
    """At these tokens and this depth: log-log between cells, beyond them that of the nearest."""
    return _on_line([(n, _on_line(points.items(), depth)) for n, points in grid.items()], n_tokens)


def _on_line(points: Iterable[tuple[int, float]], x: float) -> float:
    known = sorted(points)
    return log_log(known, min(max(x, known[0][0]), known[-1][0]))
