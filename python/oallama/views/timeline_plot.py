"""A timeline as a picture; needs matplotlib (pip install oallama[plot])."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import OallamaError
from .style import load_figure_class, save_figure

if TYPE_CHECKING:
    from ..tracing.timeline import Stage, Timeline

COLOURS = {"compute": "#0072B2", "stream": "#E69F00", "upload": "#D55E00", "data": "#009E73", "wait": "#999999"}
WORDS = {
    "compute": "computing",
    "stream": "weights, streamed ahead",
    "upload": "weights, uploaded when needed",
    "data": "activations and masks",
    "wait": "waiting for a weight",
}


def write_picture(timeline: Timeline, path: str | os.PathLike[str], title: str) -> Path:
    """Draw one panel per stage, a row per lane. Raises OallamaError without matplotlib or without spans."""
    figure_class = load_figure_class()
    from matplotlib.layout_engine import ConstrainedLayoutEngine
    from matplotlib.patches import Patch

    if not timeline.spans:
        raise OallamaError("nothing to draw: no device did anything")
    lanes, n = timeline.lanes, len(timeline.stages)
    figure = figure_class(figsize=(11, 1.1 + n * (0.8 + 0.36 * len(lanes))), layout=ConstrainedLayoutEngine())
    for axes, stage in zip(figure.subplots(n, 1, squeeze=False)[:, 0], timeline.stages, strict=True):
        for what, colour in COLOURS.items():
            for lane in {s.lane for s in timeline.spans if s.what == what}:
                axes.broken_barh(_bars(timeline, stage, lane, what), (lanes.index(lane) - 0.4, 0.8), color=colour)
        axes.set_xlim(0, stage.seconds * 1e3)
        axes.set_ylim(len(lanes) - 0.5, -0.5)
        axes.set_yticks(range(len(lanes)), lanes)
        axes.set_title(stage.name, fontsize=10, loc="left")
        axes.set_xlabel("ms")
    shown = [what for what in COLOURS if any(s.what == what for s in timeline.spans)]
    handles = [Patch(color=COLOURS[what], label=WORDS[what]) for what in shown]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)
    figure.suptitle(title, fontsize=11, x=0.01, ha="left")
    return save_figure(figure, path)


def _bars(timeline: Timeline, stage: Stage, lane: str, what: str) -> list[tuple[float, float]]:
    """(begin, length) in milliseconds of the stage."""
    return [
        ((s.begin - stage.begin) * 1e3, (s.end - s.begin) * 1e3)
        for s in timeline.spans
        if s.lane == lane and s.what == what and s.end > stage.begin and s.begin < stage.end
    ]
