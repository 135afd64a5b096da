"""What `--verify` shows: measured times of every candidate beside those predicted."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from ..base.printing import seconds
from ..data.plan import PlacementPlan
from ..data.predicted import error_percent, predicted_times
from ..errors import OallamaError
from .style import table


def render_verification(plans: Sequence[PlacementPlan]) -> Table:
    """Three rows per plan in the order given, fastest first: TTFT, TPOT and the whole request; fits 80 columns.

    The error is of the prediction, in percent of what was measured; positive: predicted too slow. Below the table: what
    was run, and why a plan could not be.

    Raises:
        OallamaError: for a plan that was not measured (`oallama.loading.verify.verify` does that).
    """
    view = table("measured")
    view.add_column("plan", no_wrap=True)
    view.add_column("time", no_wrap=True)
    for name in ("predicted", "measured", "error", "spread"):
        view.add_column(name, justify="right", no_wrap=True)
    remarks = []
    for plan in plans:
        if not plan.measured or not {"error", "request_s"} & plan.measured.keys():
            raise OallamaError(f"plan {plan.hash[:8]} was not measured; expected the plans that verify() returns")
        name = f"{plan.planner['name']} {plan.hash[:8]}"
        if "error" in plan.measured:
            view.add_row(name, "failed", "-", "-", "-", "-")
            remarks.append(f"{name}: {plan.measured['error']}")
            continue
        for i, row in enumerate(_rows(plan)):
            view.add_row("" if i else name, *row, end_section=i == 2)
    run = next((p.measured for p in plans if p.measured and "error" not in p.measured), None)
    if run:
        remarks.insert(0, f"run: {run['n_prompt']}+{run['n_generate']} tokens, {run['rounds']} rounds, medians")
    view.caption, view.caption_justify = Text("\n".join(remarks)), "left"
    return view


def _rows(plan: PlacementPlan) -> list[tuple[str, ...]]:
    assert plan.measured is not None
    measured = plan.measured
    n_prompt, n_generate = measured["n_prompt"], measured["n_generate"]
    own_prompt, own_generate = plan.predicted.workload
    ttft, tpot = predicted_times(plan, n_prompt, n_generate)
    return [
        _row(f"TTFT {n_prompt}", ttft, measured["ttft_s"]),
        _row("TPOT", tpot, measured["tpot_s"]),
        _row(f"{own_prompt}+{own_generate}", plan.predicted.request_s, measured["request_s"], measured["spread"]),
    ]


def _row(what: str, predicted: float | None, measured: float, spread: float | None = None) -> tuple[str, ...]:
    error = error_percent(predicted, measured)
    return (
        what,
        seconds(predicted),
        seconds(measured),
        "-" if error is None else f"{error:+.0f} %",
        "" if spread is None else f"{100 * spread:.0f} %",
    )
