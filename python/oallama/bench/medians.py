"""The medians of a benchmark in few columns; the reports on disk have the spread and everything else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..base.printing import seconds
from ..views.bench_table import medians_table
from .results import Result, compare, first_prompts

if TYPE_CHECKING:
    from rich.console import Group

_COLUMNS = ("engine", "test", "TTFT", "TPOT", "device MiB", "vs llama.cpp")
_VERSUS = "vs llama.cpp: TTFT / TPOT against {}; above 1x is faster"


def table(results: Sequence[Result]) -> Group:
    """A row per result; below them how to read it, first prompts, and engines that failed."""
    failed = {f"{r.engine} was left out: {r.error}" for r in results if r.error}
    rows = [_row(result, results) for result in results]
    base = next((result.engine for result in results if result.baseline), "llama.cpp")
    versus = _VERSUS.format("its own layer split in the same device bytes" if base == "llama.cpp" else base)
    return medians_table(_COLUMNS, rows, [versus, *first_prompts(results), *sorted(failed)])


def _row(result: Result, results: Sequence[Result]) -> tuple[str, ...]:
    ttft, tpot = result.summary("ttft_s"), result.summary("tpot_s")
    versus = compare(result, results)
    used = result.device_bytes()
    ratios = [f"{ratio.value:.2f}x" if ratio else "-" for ratio in (versus.ttft, versus.tpot)] if versus else []
    return (
        result.engine,
        f"{result.cell.prompt}+{result.cell.gen}" + (f" @ {result.cell.depth}" if result.cell.depth else ""),
        seconds(ttft.p50 if ttft else None),
        seconds(tpot.p50 if tpot else None),
        "-" if used is None else f"{used / 2**20:.1f}",
        "baseline" if result.baseline else " / ".join(ratios) or "-",
    )
