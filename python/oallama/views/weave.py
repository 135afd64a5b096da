"""A weave plan for the terminal. Fits 80 columns."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..base.printing import seconds
from .style import table

if TYPE_CHECKING:
    from ..weave.plan import Step, WeavePlan


def render_weave(plan: WeavePlan, names: tuple[str, str]) -> RenderableType:
    """The cold model's operators and their parts, and what either model waits. names: of the hot and cold model."""
    hot, cold = names
    load = plan.load
    steps = {f"{load.n_cold} sequences": plan.decode, "a prompt": plan.prefill}
    parts = [_operators(f"{cold}: operators of {what}", step) for what, step in steps.items()]
    waits = table(f"{hot} waits for {cold}, which computes")
    waits.add_column("")
    for what in steps:
        waits.add_column(what, justify="right", no_wrap=True)

    def row(name: str, each: list[str]) -> None:
        waits.add_row(name, *each)

    found = list(steps.values())
    row("a step without guests", [seconds(step.duration_s) for step in found])
    row("a task waits, served after the step", [seconds(step.wait_for_request_s) for step in found])
    of_gpu = plan.distance is not None
    before, after = ("every product", "as far apart as it may be") if of_gpu else ("operators", "also inside of them")
    row(f"  served after {before} (W before)", [seconds(step.splitting.wait_before_s) for step in found])
    row(f"  {after} (W after)", [seconds(step.splitting.wait_after_s) for step in found])
    row(f"W after, {plan.layers} layers, of a step", [_share(plan, step.splitting.wait_after_s) for step in found])
    row("looks for tasks, a step", [str(step.n_looks) for step in found])
    row("they cost", [seconds(plan.polls_s(step)) for step in found])
    row("  of the step", [f"{plan.polls_s(step) / step.duration_s:.2%}" for step in found])
    return Group(*parts, waits, *(Text(line) for line in _remarks(plan, hot)))


def _operators(title: str, step: Step) -> Table:
    """Operators of one kind and as many parts in a row, the longest first; small ones at the end."""
    shown = table(title)
    shown.add_column("operator", overflow="fold")
    for column in ("count", "each", "parts", "of the step"):
        shown.add_column(column, justify="right", no_wrap=True)
    total: dict[tuple[str, int], float] = defaultdict(float)
    counts: Counter[tuple[str, int]] = Counter()
    for name, taken, n in zip(step.names, step.seconds, step.splitting.parts, strict=True):
        key = (name, n)
        total[key] += taken
        counts[key] += 1
    small = {key for key, taken in total.items() if taken < step.duration_s / 100 and key[1] == 1}
    for key in sorted(total.keys() - small, key=lambda key: -total[key] / counts[key]):
        share = total[key] / step.duration_s
        shown.add_row(key[0], str(counts[key]), seconds(total[key] / counts[key]), str(key[1]), f"{share:.0%}")
    rest, n_rest = sum(total[key] for key in small), sum(counts[key] for key in small)
    if n_rest:
        shown.add_row("others", str(n_rest), seconds(rest / n_rest), "1", f"{rest / step.duration_s:.0%}")
    return shown


def _remarks(plan: WeavePlan, hot: str) -> list[str]:
    load, measured = plan.load, plan.measured
    kernels = "our kernels" if plan.attention == "oallama" else "ggml's kernels"
    lines = [
        f"{hot}: a step of {load.n_home + load.n_guests} sequences after {load.depth} tokens takes "
        f"{seconds(plan.step_s)}; {plan.waiting_share:.0%} of it may be waiting, {seconds(plan.threshold_s)} a task.",
        f"A layer's attention by {kernels}: {seconds(plan.home_s)} at home (K), {seconds(measured.guest_s)} of the "
        f"guests through a channel (N, {'by the profile' if plan.distance else 'measured'}). A look for tasks in vain: "
        f"{measured.poll_s * 1e9:.0f} ns ({'an estimate' if plan.distance else 'measured'}).",
    ]
    if plan.distance is not None:
        few, decode, prompt = plan.distance.few, plan.distance.decode, plan.distance.prompt
        lines.append(f"Looks follow every {decode} products of {few} rows at most, every {prompt} of more.")
    elif plan.part is None:
        lines.append("Looks after operators suffice.")
    else:
        lines.append(f"Threads look inside of matrix multiplications every {plan.part} multiply-adds.")
    missed = [
        what
        for what, step in (("sequences", plan.decode), ("prompts", plan.prefill))
        if step.splitting.wait_after_s > plan.threshold_s * 1.001
    ]
    if missed:
        lines.append(f"With {' and '.join(missed)} of the cold model a task waits longer than that, cut as it may be.")
    return lines


def _share(plan: WeavePlan, wait_s: float) -> str:
    return f"{wait_s * plan.layers / plan.step_s:.1%}"
