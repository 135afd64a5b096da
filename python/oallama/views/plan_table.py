"""A plan for the terminal: what goes where, a picture of the layers, and the predicted times.

Every renderable is readable without colour and fits 80 columns.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..base.printing import model_name, seconds
from ..data.budget import format_bytes
from ..data.operators import kind_of, layer_of
from ..data.plan import HOST, PlacementPlan, TensorPlacement
from ..data.predicted import describe_request
from .experts import render_experts
from .plan_cells import cell, drawn, home_of, kinds_of, short_kind, span
from .style import table


def render_plan(plan: PlacementPlan) -> RenderableType:
    """Everything `oallama plan` shows: summary, picture, the planned request, predicted times and notes."""
    parts: list[RenderableType] = [render_summary(plan), *render_unseen(plan), render_layers(plan)]
    parts += [*render_request(plan), render_times(plan), *renderspan(plan)]
    parts += [Text(f"note: {note}", style="dim") for note in plan.predicted.notes]
    return Group(*parts)


def render_summary(plan: PlacementPlan) -> Table:
    """One row per device: budget, predicted weights / KV cache / compute bytes, total, number of tensors."""
    shown = table(plan_title(plan), spare=("tensors", "compute", "KV cache", "weights"))
    shown.add_column("device", no_wrap=True)
    for column in ("budget", "weights", "KV cache", "compute", "total", "tensors"):
        shown.add_column(column, justify="right", no_wrap=True)
    for device in plan.devices:
        memory = plan.predicted.devices.get(device)
        count = sum(any(s.device == device for s in t.segments) for t in plan.tensors.values())
        budget = plan.budgets.get(device)
        sizes = (memory.weights, memory.kv, memory.compute, memory.total) if memory else (None,) * 4
        cells = ["-" if size is None else format_bytes(size) for size in (budget, *sizes)]
        shown.add_row(device, *cells, str(count))
    return shown


def render_unseen(plan: PlacementPlan) -> list[Text]:
    """A line per device for memory that is no buffer: what stays free, and what the backend takes while computing."""
    lines = [
        Text(f'{device}: {format_bytes(margin)} of the free memory stay free (budget "auto"; --margin sets it)')
        for device, margin in plan.margins.items()
    ]
    lines += [
        Text(f"{device}: {format_bytes(memory.pool)} of the total are the backend's pool for conversions, estimated")
        for device, memory in plan.predicted.devices.items()
        if memory.pool
    ]
    return lines


def render_layers(plan: PlacementPlan) -> RenderableType:
    """The picture: a row per run of identical layers, a cell per kind of matrix and one for the KV cache, and a legend.

    Of a mixture also a row of the layers' experts.

    Small tensors (norms, biases) follow their layer and are not drawn.
    """
    weights = drawn(plan)
    kinds = kinds_of(name for name in weights if layer_of(name) is not None)
    shown = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    shown.add_column("layers", justify="right", no_wrap=True)
    for kind in ("KV", *kinds):
        shown.add_column(short_kind(kind), justify="center", no_wrap=True)
    for first, last, cells in _runs(plan, weights, kinds):
        label = f"{first}" if first == last else f"{first}-{last}"
        shown.add_row(label, *(cell(home, plan) for home in cells))
    parts: list[RenderableType] = [shown]
    for name in ("token_embd.weight", "output.weight"):
        if name in plan.tensors:
            line = Text(f"{kind_of(name)} ")
            line.append_text(cell(home_of(plan.tensors[name]), plan))
            parts.append(line)
    parts += render_experts(plan)
    parts.append(_legend(plan))
    if plan.stream_caches:
        reader = next(device for device in plan.devices if device != HOST)
        parts.append(Text(f"attention runs on {reader}; KV caches on the CPU are copied there layer by layer"))
    return Group(*parts)


def describe_speed(plan: PlacementPlan) -> str:
    """The predicted speed of the request that the plan is for; "" for a plan without a prediction."""
    parts, (n_prompt, n_generate) = plan.predicted.parts, plan.predicted.workload
    if not parts:
        return ""
    speed = []
    if n_prompt:
        speed.append(f"TTFT {seconds(sum(parts['prefill'].values()))}")
    if (decode := sum(parts["decode"].values())) > 0:
        parallel = plan.planner["params"].get("n_parallel", 1)
        each = " each" if parallel > 1 else ""
        speed.append(f"{(n_generate - 1) / decode:.1f} tokens/s{each}")
    return ", then ".join(speed)


def render_request(plan: PlacementPlan) -> list[Text]:
    """A line with the predicted speed of the request that the plan is for; none for a plan without a prediction."""
    speed = describe_speed(plan)
    return [Text(f"predicted for {describe_request(plan)}: {speed}")] if speed else []


def render_times(plan: PlacementPlan) -> Table:
    """Predicted TTFT by prompt length beside predicted TPOT by depth."""
    shown = table("predicted")
    for column in ("prompt", "TTFT", "depth", "TPOT", "tokens/s"):
        shown.add_column(column, justify="right", no_wrap=True)
    ttft = [(str(n), seconds(s)) for n, s in sorted(plan.predicted.ttft_s.items())]
    tpot = [(str(n), seconds(s), f"{1 / s:.1f}" if s > 0 else "-") for n, s in sorted(plan.predicted.tpot_s.items())]
    for i in range(max(len(ttft), len(tpot))):
        left = ttft[i] if i < len(ttft) else ("", "")
        right = tpot[i] if i < len(tpot) else ("", "", "")
        shown.add_row(*left, *right)
    return shown


def renderspan(plan: PlacementPlan) -> list[Text]:
    """The request the plan was made for: seconds predicted, the range they are expected in, and what was measured."""
    n_prompt, n_generate = plan.predicted.workload
    lines = []
    if plan.predicted.range_s:
        least, most = plan.predicted.range_s
        expected = f"{plan.predicted.request_s:.3g} s, expected in {least:.3g} to {most:.3g} s"
        lines.append(Text(f"{n_prompt} + {n_generate} tokens: {expected}"))
    if plan.measured and "request_s" in plan.measured:
        least, most = plan.measured.get("range_s", (plan.measured["request_s"],) * 2)
        found = f"{plan.measured['request_s']:.3g} s in {plan.measured['rounds']} rounds ({least:.3g} to {most:.3g} s)"
        lines.append(Text(f"measured: {found}"))
    return lines


# ---- parts ---------------------------------------------------------------------------------------------------------


def plan_title(plan: PlacementPlan) -> str:
    """Model, planner, context and the plan's number in a line."""
    context = plan.context
    name = model_name(plan.model.get("name") or plan.model.get("file") or "", plan.model.get("n_params", 0))
    model = f"{name}, " if name else ""
    return f"{model}planner {plan.planner['name']}, n_ctx {context.n_ctx}, plan {plan.hash[:8]}"


def _runs(
    plan: PlacementPlan, shown: dict[str, TensorPlacement], kinds: Sequence[str]
) -> list[tuple[int, int, tuple[str, ...]]]:
    """(first layer, last layer, cells) of consecutive identical layers; the cells are KV, then `kinds`."""
    homes: dict[tuple[int, str], str] = {}
    for name, tensor in shown.items():
        layer = layer_of(name)
        if layer is not None:
            homes[layer, kind_of(name)] = home_of(tensor)
    runs: list[tuple[int, int, tuple[str, ...]]] = []
    loaded = {layer_of(name) for name in plan.tensors}  # MTP heads that are not have no cache either
    for il, kv in enumerate(plan.layers[:-1]):
        if il not in loaded:
            continue
        cells = (kv, *(homes.get((il, kind), "") for kind in kinds))
        if runs and runs[-1][2] == cells:
            runs[-1] = (runs[-1][0], il, cells)
        else:
            runs.append((il, il, cells))
    return runs


def _legend(plan: PlacementPlan) -> Text:
    homes = {*plan.layers, *(home_of(t) for t in plan.tensors.values())}
    words = {
        HOST: "CPU",
        "upload": "CPU, uploaded for large batches",
        "stream": f"CPU, streamed {_stream_tokens(plan)}",
        "split": f"split: {_shares(plan)}",
    }
    legend = Text()
    for home in (*plan.devices, "upload", "stream", "split"):
        if home in homes:
            legend.append("   " if legend else "")
            legend.append_text(cell(home, plan))
            legend.append(f" {words.get(home, home)}")
    return legend


def _stream_tokens(plan: PlacementPlan) -> str:
    """From how many tokens on weights are streamed: "always", "from 12 tokens on", "from 8 to 31 tokens on"."""
    starts = {t.stream_from for t in plan.tensors.values() if t.mode == "stream"}
    if not starts or starts == {1}:
        return "always"
    first, last = min(starts), max(starts)
    return f"from {first} tokens on" if first == last else f"from {first} to {last} tokens on"


def _shares(plan: PlacementPlan) -> str:
    """How much of divided weights is where: "CUDA0 computes 78 to 79 % of each while CPU computes the rest"."""
    parts = [t.segments[1] for t in plan.tensors.values() if t.segments[1:]]
    shares = [t.segments[1].nbytes / t.nbytes for t in plan.tensors.values() if t.segments[1:] and t.segments[1].rows]
    counts = [len(part.experts) for part in parts if part.experts and not part.slots]
    slots = [part.slots for part in parts if part.slots]
    found = []
    if shares:
        first, last = f"{min(shares):.0%}", f"{max(shares):.0%}"
        share = first if first == last else f"{first[:-1]} to {last}"
        found.append(f"{parts[0].device} computes {share} of each while {HOST} computes the rest")
    if counts:
        found.append(f"{parts[0].device} has {span(counts)} experts of each while {HOST} computes the others")
    if slots:
        found.append(f"{parts[0].device} keeps {span(slots)} experts of each in slots, those used most and last")
    return "; ".join(found)
