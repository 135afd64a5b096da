"""Latencies as a picture: which share of them took at most how long; needs matplotlib."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from .style import COLOURS, load_figure_class, save_figure


def write_shares(panels: Mapping[str, Mapping[str, Sequence[float]]], path: str | os.PathLike[str]) -> Path:
    """Draw a panel per title and a curve per label, of values in seconds.

    Raises:
        OallamaError: without matplotlib, or if the file cannot be written.
    """
    figure = load_figure_class()(figsize=(11, 3.6), layout="constrained")
    for plot, (title, curves) in zip(figure.subplots(1, len(panels)), panels.items(), strict=True):
        for number, (label, values) in enumerate(curves.items()):
            share = [(i + 1) / len(values) for i in range(len(values))]
            plot.step(sorted(values), share, where="post", label=label, color=COLOURS[number % len(COLOURS)])
        plot.set(title=title, xlabel="seconds", ylabel="share", xlim=(0, None), ylim=(0, 1))
        plot.grid(alpha=0.3)
    figure.axes[0].legend(loc="lower right", fontsize=8)
    return save_figure(figure, path)
