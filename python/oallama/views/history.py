"""The history of runs as a table: predicted and measured times, and what was learned from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rich.console import Group
from rich.table import Table
from rich.text import Text

from ..base.printing import seconds
from .style import table

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ..data.history import History, Run

_SHOWN = 20


def render_history(history: History, learned: Mapping[str, float]) -> RenderableType:
    """The last runs, newest last, and the factors that later predictions take; fits 80 columns."""
    if not history.runs:
        return Text("no run was recorded yet")
    shown = history.runs[-_SHOWN:]
    parts: list[RenderableType] = [_runs(m, [r for r in shown if r.model == m]) for m in {r.model: 0 for r in shown}]
    if len(history.runs) > _SHOWN:
        parts.append(Text(f"{len(history.runs) - _SHOWN} older runs are not shown", style="dim"))
    parts.append(Text(describe_learned(learned), style="dim"))
    return Group(*parts)


def _runs(model: str, runs: Sequence[Run]) -> Table:
    """A model's runs: when in UTC, and whether other programs were busy meanwhile."""
    view = table(model)
    for name in ("when", "plan"):
        view.add_column(name, no_wrap=True)
    for name in ("depth", "predicted", "TPOT", "ratio"):
        view.add_column(name, justify="right", no_wrap=True)
    view.add_column("how", no_wrap=True)
    for run in runs:
        view.add_row(
            run.created[5:16].replace("T", " "),
            run.plan[:8],
            str(run.depth),
            seconds(run.predicted_tpot_s),
            seconds(run.tpot_s),
            f"{run.ratio:.2f}" if run.ratio else "-",
            run.source + (f", batch {run.batch}" if run.batch > 1 else "") + ("" if run.clean else ", busy"),
        )
    return view


def describe_learned(learned: Mapping[str, float]) -> str:
    """What predictions multiply their times by, as one line."""
    if not learned:
        return "learned from runs: nothing that changes predictions"
    factors = ", ".join(f"{name} {factor:.2f}x" for name, factor in sorted(learned.items()))
    return f"learned from runs: {factors}"
