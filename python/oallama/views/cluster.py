"""An allocation for the terminal: who computes what, what every term costs, what else would cost. Fits 80 columns."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..data.budget import format_bytes
from .style import table

if TYPE_CHECKING:
    from ..cluster.allocation.allocation import Allocation
    from ..cluster.allocation.cluster_plan import ClusterPlan
    from ..cluster.allocation.explain import Explanation
    from ..cluster.allocation.network import Network
    from ..cluster.allocation.outcome import Solved

_TERMS = (
    ("compute_s", "compute"),
    ("latency_s", "link latency"),
    ("transfer_s", "link transfer"),
    ("jitter_s", "QoS: jitter"),
    ("loss_s", "QoS: loss"),
    ("loss_variance_s", "QoS: loss variance"),
    ("complexity_s", "complexity"),
    ("total_s", "total"),
)


def render_explanation(found: Explanation) -> RenderableType:
    """Everything: the stages, the terms beside the runner-up and the plan without QoS, the price of each device."""
    return Group(render_stages(found.chosen), _terms(found), *_remarks(found))


def render_stages(allocation: Allocation) -> Table:
    """One row per stage of the pipeline, in order: layers, bytes held of the device's memory, seconds."""
    problem = allocation.problem
    shown = table(f"{len(allocation.layers)} layers on {len(allocation.ranges)} devices, links {problem.links}")
    shown.add_column("device", overflow="fold")
    for column in ("layers", "count", "memory", "of", "compute"):
        shown.add_column(column, justify="right", no_wrap=True)
    for device, first, end in allocation.ranges:
        on = problem.device(device)
        seconds = sum(problem.seconds_on(on, layer) for layer in problem.layers[first:end])
        held = sum(layer.memory_bytes for layer in problem.layers[first:end])
        label = f"{first}" if end == first + 1 else f"{first}-{end - 1}"
        shown.add_row(
            device, label, str(end - first), format_bytes(held), format_bytes(on.memory_bytes), _time(seconds)
        )
    return shown


def render_network(network: Network, client: str) -> Table:
    """One row per pair of hosts; both directions are taken to be alike."""
    shown = table("links")
    shown.add_column("between", overflow="fold")
    for column in ("latency", "bandwidth", "jitter", "loss", "message"):
        shown.add_column(column, justify="right", no_wrap=True)
    for (a, b), link in network.links.items():
        if a == client or (client not in (a, b) and a < b):
            loss = f"{link.loss:.2%}" if link.loss else "0"
            bandwidth = f"{format_bytes(int(link.bandwidth))}/s"
            message = f"{format_bytes(link.message_bytes)} {_time(link.message_s)}" if link.message_s else "-"
            shown.add_row(f"{a} - {b}", _time(link.latency_s), bandwidth, _time(link.jitter_s), loss, message)
    return shown


def render_candidates(plan: ClusterPlan) -> RenderableType:
    """Every way to run the model, the fastest first, and why others cannot be."""
    request, chosen = plan.request, plan.chosen
    n = request.n_parallel
    what = f"{request.n_prompt} + {request.n_generate} tokens" + (f", {n} requests at once" if n > 1 else "")
    is_measured = any(c.measured_ttft_s is not None for c in plan.candidates)
    shown = table(f"ways to run it: {what}")
    shown.add_column("", no_wrap=True)
    shown.add_column("way", overflow="fold")
    for column in ("TTFT", "TPOT", "request", *(["measured"] if is_measured else [])):
        shown.add_column(column, justify="right", no_wrap=True)
    possible = [c for c in plan.candidates if c.predicted_s(request) is not None]
    for c in sorted(possible, key=lambda c: c.measured_s(request) or c.predicted_s(request) or 0.0):
        times = (c.ttft_s, c.tpot_s, c.predicted_s(request), *([c.measured_s(request)] if is_measured else []))
        is_chosen = chosen is not None and c.name == chosen.name
        cells = ("-" if s is None else _time(s) for s in times)
        small = f", micro-batches of {c.n_ubatch}" if 0 < c.n_ubatch < request.n_prompt else ""
        shown.add_row("*" if is_chosen else "", c.name + small, *cells, style="bold" if is_chosen else "")
    reasons = [Text(f"{c.name}: no, {c.why_not}") for c in plan.candidates if c not in possible]
    return Group(shown, *reasons)


def _terms(found: Explanation) -> Table:
    columns = {"chosen": found.chosen, "runner-up": found.runner_up, "no QoS terms": found.time_only}
    terms = {name: plan.terms for name, plan in columns.items() if plan is not None}
    shown = table("objective per token" if found.chosen.problem.is_per_token else "objective of the request")
    shown.add_column("term", no_wrap=True)
    for name in terms:
        shown.add_column(name, justify="right", no_wrap=True)
    for attribute, name in _TERMS:
        cells = (_time(getattr(each, attribute)) for each in terms.values())
        shown.add_row(name, *cells, style="bold" if name == "total" else "")
    return shown


def _remarks(found: Explanation) -> list[Text]:
    cost = found.chosen.terms.total_s
    lines = [
        f"without {name}: {'does not fit' if other is None else f'+{_time(max(0.0, other.terms.total_s - cost))}'}"
        for name, other in found.without.items()
    ]
    if found.moved_by_qos:
        lines.append(
            f"with jitter and loss ignored, {found.moved_by_qos} layers would be elsewhere: "
            f"{_time(max(0.0, found.chosen.terms.time_s - found.time_only.terms.time_s))} less without any"
        )
    else:
        lines.append("jitter and loss change nothing: the same layers are chosen with wq1 = wq2 = wq3 = 0")
    lines.append(_solved(found.chosen.solved))
    return [Text(line) for line in lines]


def _solved(how: Solved) -> str:
    """Which solver, its time, and what it proves."""
    best = "no allocation" + (" with the devices in this order" if how.solver == "dynamic" else "")
    if how.gap is None:
        proof = "how far it is from the best is not known: the time was up"
    elif how.gap == 0:
        proof = f"{best} costs less"
    else:
        proof = f"{best} costs less by more than {how.gap:.2%}"
    return f"solved by {how.method} in {_time(how.seconds)} ({how.solver}): {proof}"


def _time(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.3f} s"
    return f"{seconds * 1e3:.3f} ms" if seconds >= 1e-3 or seconds == 0 else f"{seconds * 1e6:.1f} µs"
