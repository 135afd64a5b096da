"""Why the chosen plan won: every candidate with its predictions, where their seconds go, and what differs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..base.printing import seconds
from ..data.budget import format_bytes
from ..data.plan import HOST, PlacementPlan
from ..data.plan_difference import describe_difference
from ..data.predicted import TIE, describe_request, traffic, unusual_form
from .experts import render_expected
from .history import describe_learned
from .style import table

if TYPE_CHECKING:
    from ..planning import Candidates

CAUSES = {
    "targets": "matrices",
    "attention": "attention",
    "transfers": "transfers",
    "switches": "device changes",
    "other": "small operators",
    "copies": "streamed weights",
}


def render_candidates(found: Candidates) -> RenderableType:
    """Everything `oallama plan --explain` adds to the plan: table, reasons, differences. Fits 80 columns."""
    plans = [*found.plans.items()]
    parts: list[RenderableType] = [_table(plans)]
    parts += [Text(f"{name} is left out: {error}", style="dim") for name, error in found.failed.items()]
    parts += [
        Text(f"{name} is not made: it would take {bound:.3g} s at least", style="dim")
        for name, bound in found.skipped.items()
    ]
    winner = plans[0]
    if (second := runner_up(found)) is not None:
        parts.append(Text(reason(found)))
        parts.append(_causes([winner, second]))
        parts.append(_differences(winner[1], *second))
    parts += render_expected(winner[1])
    if winner[1].predicted.learned:
        parts.append(Text(describe_learned(winner[1].predicted.learned)))
    return Group(*parts)


def runner_up(found: Candidates) -> tuple[str, PlacementPlan] | None:
    """The next plan, with its name, that differs from the chosen one; None where all are the same."""
    plans = [*found.plans.items()]
    return next(((name, plan) for name, plan in plans[1:] if describe_difference(plan, found.best)), None)


def reason(found: Candidates) -> str:
    """Why the first plan was chosen, in one sentence; "" where there is no other one."""
    second = runner_up(found)
    if second is None:
        return ""
    (name, winner), (rival, other) = next(iter(found.plans.items())), second
    ratio = other.predicted.request_s / winner.predicted.request_s
    fastest = min(found.plans, key=lambda name: found.plans[name].predicted.request_s)
    if winner.predicted.request_s > found.plans[fastest].predicted.request_s:
        more = _less_safe(winner, found.plans[fastest])
        why = f"{fastest} is predicted to be faster by less than that may be off, and {more}"
    elif ratio <= 1 + TIE:
        why = f"{rival} is within {TIE:.0%}, but {_less_safe(winner, other)}"
    else:
        why = f"{ratio:.2f}x faster than {rival}, the next that differs"
    params = winner.planner["params"]
    proof = f"; no placement is faster by more than {params['gap']:.2%} ({params['status']})" if "gap" in params else ""
    room = ""
    if nbytes := params.get("gave_way"):
        slots = f"slots for prompts from {params['streams_later']} tokens on"
        room = f"; {format_bytes(nbytes)} of weights give way to {slots}"
    return f"{name}: {why}{proof}{room}"


def _less_safe(winner: PlacementPlan, other: PlacementPlan) -> str:
    """What the other plan has that the winner does without, in the order in which plans are chosen."""
    if traffic(other) > traffic(winner):
        return "has more traffic between devices"
    if len(other.devices) > len(winner.devices):
        return "needs more devices"
    if unusual_form(other) > unusual_form(winner):
        return "does not have llama.cpp's own form of attention"
    return "is no safer"


def _table(plans: Sequence[tuple[str, PlacementPlan]]) -> Table:
    winner = plans[0][1]
    _, n_generate = winner.predicted.workload
    title = f"candidates, predicted for {describe_request(winner)}"
    shown = table(title, spare=("micro-batch", HOST, "TTFT", "TPOT"))
    shown.add_column("planner", no_wrap=True)
    for column in ("request", "TTFT", "TPOT", *_devices(plans), "micro-batch"):
        shown.add_column(column, justify="right", no_wrap=True)
    for name, plan in plans:
        used = [plan.predicted.devices.get(device) for device in _devices(plans)]
        prefill, decode = (sum(plan.predicted.parts[stage].values()) for stage in ("prefill", "decode"))
        shown.add_row(
            name,
            f"{plan.predicted.request_s:.3g} s",
            _time(prefill),
            _time(decode / max(1, n_generate - 1)),
            *("-" if memory is None else format_bytes(memory.total) for memory in used),
            str(plan.context.n_ubatch) + (" unfused" if plan.context.flash_attn == "off" else ""),
            style="bold" if plan is winner else "",
        )
    return shown


def _causes(plans: Sequence[tuple[str, PlacementPlan]]) -> Table:
    """Where the seconds of winner and runner-up go."""
    shown = table("seconds by cause")
    shown.add_column("", no_wrap=True)
    for name, _ in plans:
        for stage in ("prefill", "decode"):
            shown.add_column(f"{name} {stage}", justify="right")
    for cause, label in CAUSES.items():
        cells = [plan.predicted.parts[stage][cause] for _, plan in plans for stage in ("prefill", "decode")]
        shown.add_row(label, *(_time(s) for s in cells))
    return shown


def _differences(winner: PlacementPlan, name: str, runner_up: PlacementPlan) -> Text:
    lines = describe_difference(runner_up, winner)
    return Text("\n  ".join([f"from {name} to the chosen plan:", *lines]))


def _devices(plans: Iterable[tuple[str, PlacementPlan]]) -> list[str]:
    names = dict.fromkeys(device for _, plan in plans for device in plan.devices)
    return [name for name in names if name != HOST] + [HOST]


def _time(s: float) -> str:
    return seconds(s or None)
