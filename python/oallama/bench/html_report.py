"""A benchmark as one HTML file: what was measured with its intervals, beside each plan's report."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..base.printing import model_name
from ..data.plan import PlacementPlan
from ..views.intervals_svg import Interval, intervals_svg
from ..views.plan_report import plan_view
from ..views.templates import render
from .report import observations
from .results import Result, compare
from .stats import Ratio

_CHARTS = {"ttft": "TTFT", "tpot": "TPOT"}


def html_report(jobs: Sequence[tuple[str, PlacementPlan, Sequence[Result]]], command: str = "") -> str:
    """The HTML text. jobs: label, plan and results of each. command: what has measured them, shown at the end."""
    _, plan, results = jobs[0]
    environment = results[0].environment.get("hardware", {})
    machine = [*(gpu["name"] for gpu in environment.get("gpus", ())), environment.get("cpu", "")]
    name = model_name(plan.model.get("name") or plan.model.get("file") or "", plan.model.get("n_params", 0))
    shown = [_job(*job) for job in jobs]
    return render(
        "bench_report.html", title=f"{name}, measured", machine=", ".join(filter(None, machine)), jobs=shown,
        command=command,
    )  # fmt: skip


def _job(label: str, plan: PlacementPlan, results: Sequence[Result]) -> dict[str, Any]:
    measured = [result for result in results if result.samples]
    charts = [{"title": title, "svg": intervals_svg(_rows(measured, key))} for key, title in _CHARTS.items()]
    return {
        "label": label,
        "charts": [chart for chart in charts if chart["svg"]],
        "rounds": max((len(result.samples) for result in measured), default=0),
        "versus": next((result.engine for result in results if result.baseline), ""),
        "notes": observations(results),
        "view": plan_view(plan),
    }


def _rows(results: Sequence[Result], key: str) -> list[Interval]:
    found = []
    for result in results:
        values = result.values(f"{key}_s")
        summary = result.summary(f"{key}_s")
        if not values or summary is None:
            continue
        versus = compare(result, results)
        expected = getattr(result.prediction, f"{key}_s")
        note = _factor(getattr(versus, key)) if versus else ""
        found.append(Interval(str(result.cell), result.engine, min(values), summary.p50, max(values), expected, note))
    return found


def _factor(ratio: Ratio | None) -> str:
    return f", {ratio.value:.2f}x [{ratio.low:.2f}, {ratio.high:.2f}]" if ratio else ""
