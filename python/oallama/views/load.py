"""What `oallama bench serve` shows: requests and throughput, latencies, the runs of a search, and remarks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.table import Table

from ..base.printing import seconds
from .style import table

if TYPE_CHECKING:
    from ..bench.load import Load, Percentiles, Run, Slo, Summary

LATE_S = 0.02
CACHED = 0.05
SHOWN_ERRORS = 3
LATENCIES = (("TTFT", "ttft_s"), ("TPOT", "tpot_s"), ("ITL", "itl_s"), ("E2E", "e2e_s"))
PERCENTILES = ("mean", "p50", "p90", "p95", "p99")


def requests_table(found: Sequence[Summary], run: Run, slo: Slo) -> Table:
    """Requests and throughput of a run, a column a model."""
    shown = table(f"{run.end_s - run.load.warmup_s:.0f} s measured")
    shown.add_column("requests")
    for of in found:
        shown.add_column(of.model, justify="right")
    rows: dict[str, list[str]] = {
        "asked for": [f"{of.rate:.3g}/s" for of in found],
        "sent": [f"{of.sent}" for of in found],
        "completed": [f"{of.completed}" for of in found],
        "refused": [f"{of.refused}" for of in found],
        "failed": [f"{of.failed}" for of in found],
        "unfinished": [f"{of.unfinished}" for of in found],
        "tokens of prompts, answers": [
            f"{of.n_prompt or of.asked_prompt:.0f}, {of.n_answer or of.asked_answer:.0f}" for of in found
        ],
        "completed per second": [_digits(of.requests_per_s) for of in found],
        "tokens per second in, out": [f"{_digits(of.tokens_in_per_s)}, {_digits(of.tokens_out_per_s)}" for of in found],
    }
    wanted = [f"{name} {seconds(s)}" for name, s in (("TTFT", slo.ttft_s), ("TPOT", slo.tpot_s)) if s is not None]
    if wanted:
        rows[f"within {', '.join(wanted)}"] = [f"{of.attainment:.0%}" for of in found]
        rows["  requests per second"] = [_digits(of.good_requests_per_s) for of in found]
        rows["  tokens per second out"] = [_digits(of.good_tokens_per_s) for of in found]
    for name, cells in rows.items():
        shown.add_row(name, *cells)
    return shown


def _digits(number: float) -> str:
    """Three digits, or all before the point."""
    return f"{number:.0f}" if number >= 100 else f"{number:.3g}"


def latencies_table(found: Sequence[Summary]) -> Table:
    """Latencies of a run, four rows a model."""
    shown = table()
    for name in ("model", "", *PERCENTILES):
        shown.add_column(name, justify="left" if name in ("model", "") else "right")
    for of in found:
        for i, (title, field) in enumerate(LATENCIES):
            values = getattr(of, field)
            cells = [seconds(getattr(values, name) if values else None) for name in PERCENTILES]
            shown.add_row("" if i else of.model, title, *cells, end_section=title == LATENCIES[-1][0])
    return shown


def search_table(done: Sequence[tuple[Run, Sequence[Summary]]]) -> Table:
    """What every run of a search attained."""
    shown = table("runs of the search")
    shown.add_column("requests/s")
    targets = done[0][0].load.targets
    for target in targets:
        shown.add_column(f"{target.model}: met by", justify="right")
    for run, found in done:
        met = {of.model: f"{of.attainment:.0%} of {of.sent}" for of in found}
        cells = [met.get(target.model, "-") for target in targets]
        shown.add_row(", ".join(f"{target.rate:.3g}" for target in run.load.targets), *cells)
    return shown


def highest(load: Load, good: float | None, bad: float | None, attainment: float) -> str:
    """The outcome of a search in a sentence."""

    def rates(factor: float) -> str:
        return ", ".join(f"{target.model} {target.rate * factor:.3g}/s" for target in load.targets)

    if good is None:
        return f"the objective is not met by {attainment:.0%} even at {rates(bad or 1.0)}"
    end = "no higher one was tried" if bad is None else f"no longer at {rates(bad)}"
    return f"met by {attainment:.0%} up to {rates(good)}; {end}"


def remarks(run: Run, found: Sequence[Summary], late: Percentiles | None) -> Iterator[str]:
    """What a reader has to know besides the tables. late: how late requests were sent."""
    if late and late.p99 > LATE_S:
        yield f"requests were sent late, {seconds(late.p50)} at p50, {seconds(late.p99)} at p99; TTFT includes it"
    if run.cpu_share > 0.5:
        yield f"the generator itself used {run.cpu_share:.0%} of a CPU"
    if run.n_capped:
        yield f"{run.n_capped} requests waited for one of {run.load.connections} connections; raise --connections"
    for of in found:
        if of.short:
            yield f"{of.short} answers of {of.model} ended before the length that was asked for"
        if of.cached > CACHED:
            yield f"{of.model} had {of.cached:.0%} of the prompts' tokens in its cache"
        if of.refused or of.n_retries:
            yield (
                f"{of.model} was too busy for {of.refused} requests, {of.retry_after} times with Retry-After; "
                f"{of.n_retries} were sent again"
            )
        for error, n in list(of.errors.items())[:SHOWN_ERRORS]:
            yield f"{of.model}, {n} times: {error}"
