"""What is where in a loaded model, and how fast it ran, for the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from .experts import render_hits
from .style import table

if TYPE_CHECKING:
    from ..loading.placement import Placement
    from ..loading.run_times import RunTimes


def render_placement(placement: Placement) -> Group:
    """Bytes per device beside those predicted, remarks, and times and experts' hits of a model that has run."""
    parts: list[RenderableType] = [_bytes(placement)]
    parts += [
        f"{d.device}: predicted has {d.predicted.pool / 2**20:.1f} MiB for the backend's pool, which measured lacks"
        for d in placement.devices
        if d.predicted and d.predicted.pool
    ]
    if placement.left_mapped:
        parts.append(
            f"{placement.left_mapped / 2**20:.1f} MiB of weights on the host stay in the mapped file, not repacked for "
            "faster kernels: memory is short"
        )
    parts += [placement.times] if placement.times else []
    return Group(*parts, *(render_hits(placement.experts) if placement.experts else []))


def render_run_times(times: RunTimes) -> Group:
    """Tokens per second of prompt and generation beside those predicted, and what to do when they drift."""
    shown = table("speed, tokens/s")
    shown.add_column("", no_wrap=True)
    for name in ("tokens", "predicted", "measured", "measured / predicted"):
        shown.add_column(name, justify="right", no_wrap=True)
    prompt = _speeds(times.n_prompt, times.predicted_prefill_s, times.prefill_s)
    shown.add_row("prompt", str(times.n_prompt), *prompt)
    shown.add_row("generation", str(times.n_generate), *_speeds(1, times.predicted_tpot_s, times.tpot_s))
    drift = times.drift()
    return Group(shown, *([Text(drift)] if drift else []))


def _bytes(placement: Placement) -> Table:
    shown = table("placement, MiB")
    shown.add_column("device", no_wrap=True)
    for name in ("budget", "predicted", "measured", "weights", "KV", "compute", "tensors"):
        shown.add_column(name, justify="right", no_wrap=True)
    for d in placement.devices:
        measured = (d.measured.total, d.measured.weights, d.measured.kv, d.measured.compute)
        sizes = (d.budget, d.predicted.total if d.predicted else None, *measured)
        cells = ("-" if size is None else f"{size / 2**20:.1f}" for size in sizes)
        shown.add_row(d.device, *cells, "-" if d.tensors is None else str(len(d.tensors)))
    return shown


def _speeds(n: int, predicted_s: float | None, measured_s: float | None) -> tuple[str, ...]:
    speeds = ("-" if not s else f"{n / s:.1f}" for s in (predicted_s, measured_s))
    return (*speeds, f"{predicted_s / measured_s:.2f}" if predicted_s and measured_s else "-")
