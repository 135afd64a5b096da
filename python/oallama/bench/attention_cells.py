"""One attention operator as bench/attention.py measures it: what it reads and computes at least, and how near it came.

Lines are those that bench/attention.py, bench/peak.py and bench/products.py record.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from .script import Lines

FORMS = ("fused", "unfused", "ours")
BYTES = {"f32": 4.0, "f16": 2.0, "bf16": 2.0, "q8_0": 34 / 32, "q4_0": 18 / 32}  # of a cached value
MATRICES = "q8_0"  # the type of the products that bound many rows
FEW_TOKENS, FEW_GOAL, MANY_GOAL = 4, 0.75, 0.60


@dataclass(frozen=True)
class Cell:
    """One operator: heads of queries, heads of K and V, their width, the type of both, query tokens, cached tokens."""

    n_head: int
    n_head_kv: int
    width: int
    cache: str
    n_tokens: int
    depth: int

    @classmethod
    def of(cls, heads: str, cache: str, n_tokens: int, depth: int) -> Cell:
        """heads: of queries / of K and V / width, as "40/8/128"."""
        n_head, n_head_kv, width = map(int, heads.split("/"))
        return cls(n_head, n_head_kv, width, cache, n_tokens, depth)

    @classmethod
    def of_line(cls, line: dict[str, Any]) -> Cell:
        return cls.of(line["heads"], line["cache"], line["n_tokens"], line["depth"])

    @property
    def n_values(self) -> int:
        """Of K and V."""
        return self.depth * self.n_head_kv * 2 * self.width

    @property
    def kv_bytes(self) -> float:
        return self.n_values * BYTES[self.cache]

    @property
    def n_multiply_adds(self) -> int:
        """Every query token with the whole depth; a causal mask spares next to nothing of it."""
        return 2 * self.n_tokens * self.depth * self.n_head * self.width

    @property
    def flops(self) -> int:
        return 2 * self.n_multiply_adds

    @property
    def intensity(self) -> float:
        """Flops per byte of K and V read once."""
        return self.flops / self.kv_bytes


def matrix_rate(n_rows: int, products: Lines, peak_gflop_s: float) -> float:
    """GFLOP/s that products reach: the fastest recorded form of Q8_0 matrices with that many rows, or the f32 peak."""
    rates = [max(line["gflop_s"].values()) for line in products if line["type"] == MATRICES and line["rows"] == n_rows]
    return max([*rates, peak_gflop_s])


def bound_s(cell: Cell, read_gb_s: float, gflop_s: float) -> float:
    """Seconds that the operator takes at least: K and V read once, or its products."""
    return max(cell.kv_bytes / read_gb_s, cell.flops / gflop_s) / 1e9


def share(line: dict[str, Any], matrices_gflop_s: float) -> tuple[float, float]:
    """(what our kernels reached, the goal), as shares of the read rate for few tokens, else of the matrices' rate."""
    if line["n_tokens"] <= FEW_TOKENS:
        return line["gb_s"]["ours"] / line["read_gb_s"], FEW_GOAL
    return line["gflop_s"]["ours"] / matrices_gflop_s, MANY_GOAL


def table(lines: Lines, products: Lines, peak_gflop_s: float) -> Iterator[str]:
    """A table in Markdown: the forms beside the bound, in ms."""
    yield "| cache | query tokens, depth | ggml fused | ggml unfused | bound | ours | x | ours reach | goal |"
    yield "|---|---|--:|--:|--:|--:|--:|---|---|"
    for line in lines:
        cell = Cell.of_line(line)
        rate = matrix_rate(cell.n_tokens, products, peak_gflop_s)
        reached, goal = share(line, rate)
        what = f"the read rate, {line['read_gb_s']:.1f} GB/s" if goal == FEW_GOAL else f"{rate:.0f} GFLOP/s"
        times = [f"{line['ms'][form]:.1f}" if form in line["ms"] else "-" for form in FORMS]
        times.insert(2, f"{1e3 * bound_s(cell, line['read_gb_s'], rate):.2f}")
        met = f"{100 * goal:.0f} %: {'met' if reached >= goal else 'missed'}"
        yield (
            f"| {cell.cache} | {cell.n_tokens}, {cell.depth} | {' | '.join(times)} "
            f"| {line['ours_times_rival']['value']:.1f}x | {100 * reached:.0f} % of {what} | {met} |"
        )
