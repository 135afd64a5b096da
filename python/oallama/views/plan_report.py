"""A plan as one HTML file that needs nothing else: its map, memory, seconds by cause, and the candidates."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..base.printing import seconds
from ..data.budget import format_bytes
from ..data.plan import HOST, PlacementPlan
from ..data.predicted import describe_request
from .candidates import CAUSES, reason, runner_up
from .memory_bars import PARTS, memory_bars
from .placement_map import placement_map
from .placement_svg import placement_svg
from .plan_table import describe_speed, plan_title
from .style import COLOURS
from .templates import render

if TYPE_CHECKING:
    from ..planning import Candidates
    from ..planning.tensor_seconds import TensorSeconds

_STAGES = {"prefill": "prompt", "decode": "generation"}


def plan_report(
    plan: PlacementPlan,
    found: Candidates | None = None,
    times: Mapping[str, TensorSeconds] | None = None,
    command: str = "",
) -> str:
    """The HTML text; arguments as of `plan_view`. command: what has made the plan, shown at the end."""
    return render("plan_report.html", view=plan_view(plan, found, times), command=command)


def plan_view(
    plan: PlacementPlan, found: Candidates | None = None, times: Mapping[str, TensorSeconds] | None = None
) -> dict[str, Any]:
    """What `plan_sections.html` shows. found: all candidates, of which the plan is one. times: what weights take."""
    drawn = placement_map(plan, times)
    compared = [(plan.planner["name"], plan)]
    if found and (second := runner_up(found)):
        compared.append(second)
    return {
        "title": plan_title(plan),
        "hash": plan.hash,
        "speed": describe_speed(plan),
        "request": describe_request(plan),
        "range": _range(plan),
        "reason": _reason(plan, found),
        "map": placement_svg(drawn, standalone=False),
        "memory": memory_bars(plan),
        "parts": PARTS,
        "bars": _bars(compared),
        "causes": [*CAUSES.values()],
        "candidates": _candidates(found) if found else [],
        "left_out": [f"{name} is left out: {error}" for name, error in found.failed.items()] if found else [],
        "skipped": _skipped(found) if found else [],
        "ttft": [(n, seconds(s)) for n, s in sorted(plan.predicted.ttft_s.items())],
        "tpot": [(n, seconds(s), f"{1 / s:.1f}" if s else "-") for n, s in sorted(plan.predicted.tpot_s.items())],
        "tensors": [cell.facts for cell in drawn.cells],
        "notes": plan.predicted.notes,
        "colours": COLOURS,
    }


def _reason(plan: PlacementPlan, found: Candidates | None) -> str:
    if plan.measured:
        return "chosen because it was the fastest of those that were measured"
    return reason(found) if found else ""


def _range(plan: PlacementPlan) -> str:
    if not plan.predicted.range_s:
        return ""
    least, most = plan.predicted.range_s
    return f"the request takes {seconds(plan.predicted.request_s)}, expected in {seconds(least)} to {seconds(most)}"


def _bars(plans: Sequence[tuple[str, PlacementPlan]]) -> list[dict[str, Any]]:
    """Per stage and plan its seconds by cause, as shares of the longer one's."""
    bars = []
    for stage, word in _STAGES.items():
        parts = {name: plan.predicted.parts.get(stage, {}) for name, plan in plans}
        longest = max((sum(p.values()) for p in parts.values()), default=0.0)
        for name, causes in parts.items():
            whole = sum(causes.values())
            pieces = [
                {"cause": i, "share": 100 * causes[cause] / longest, "text": f"{label} {seconds(causes[cause])}"}
                for i, (cause, label) in enumerate(CAUSES.items())
                if causes.get(cause, 0.0) > 0
            ]
            if whole > 0:
                bars.append({"name": f"{word}, {name}", "text": seconds(whole), "pieces": pieces})
    return bars


def _candidates(found: Candidates) -> list[dict[str, Any]]:
    return [
        {
            "name": name,
            "request": seconds(plan.predicted.request_s),
            "ttft": seconds(sum(plan.predicted.parts.get("prefill", {}).values()) or None),
            "tpot": seconds(_tpot(plan)),
            "bytes": ", ".join(_totals(plan)),
            "chosen": plan is found.best,
        }
        for name, plan in found.plans.items()
    ]


def _tpot(plan: PlacementPlan) -> float | None:
    decode = sum(plan.predicted.parts.get("decode", {}).values())
    return decode / max(1, plan.predicted.workload[1] - 1) or None


def _totals(plan: PlacementPlan) -> Iterable[str]:
    for device in plan.devices:
        if device != HOST and device in plan.predicted.devices:
            yield f"{device} {format_bytes(plan.predicted.devices[device].total)}"


def _skipped(found: Candidates) -> list[str]:
    return [f"{name} is not made: it would take {bound:.3g} s at least" for name, bound in found.skipped.items()]
