"""Trials as a PNG: KL divergence against bytes, and against predicted seconds; needs matplotlib."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .style import COLOURS, MARKERS, load_figure_class, save_figure

if TYPE_CHECKING:
    from ..quantizing.search import Trial


def write_frontier(trials: Sequence[Trial], path: str | os.PathLike[str], title: str = "") -> Path:
    """Draw every trial as a dot, and the trials that no other beats as a line.

    With predicted times a second panel has seconds per token. Raises OallamaError without matplotlib, or when the file
    cannot be written.
    """
    timed = all(trial.tpot_s is not None for trial in trials)
    figure = load_figure_class()(figsize=(11 if timed else 6, 4.5), layout="constrained")
    panels = figure.subplots(1, 2 if timed else 1, squeeze=False)[0]
    _panel(panels[0], trials, [trial.file_bytes / 2**20 for trial in trials], "file in MiB")
    if timed:
        _panel(panels[1], trials, [(trial.tpot_s or 0.0) * 1e3 for trial in trials], "predicted TPOT in ms")
    panels[0].legend(frameon=False)
    figure.suptitle(title, fontsize=11, x=0.01, ha="left")
    return save_figure(figure, path)


def _panel(plot: Any, trials: Sequence[Trial], costs: Sequence[float], label: str) -> None:
    for number, kind in enumerate(dict.fromkeys(trial.kind for trial in trials)):
        own = [(cost, trial) for cost, trial in zip(costs, trials, strict=True) if trial.kind == kind]
        plot.plot(
            [cost for cost, _ in own],
            [trial.kld for _, trial in own],
            MARKERS[number % len(MARKERS)],
            color=COLOURS[number % len(COLOURS)],
            label=kind,
        )
    front: list[tuple[float, float]] = []
    for cost, kld in sorted((cost, trial.kld) for cost, trial in zip(costs, trials, strict=True)):
        if not front or kld < front[-1][1]:
            front.append((cost, kld))
    plot.step(*zip(*front, strict=True), where="post", color="#999999", linewidth=1, zorder=0)
    plot.set_yscale("symlog", linthresh=1e-5)
    plot.set_xlabel(label)
    plot.set_ylabel("KL divergence in nats, lower is better")
    plot.grid(alpha=0.3)
    plot.spines[["top", "right"]].set_visible(False)
