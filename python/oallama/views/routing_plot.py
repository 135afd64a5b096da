"""A routing trace as a picture: hits by k, and experts by tokens of a batch; needs matplotlib (oallama[plot])."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..data.expert_hits import POLICIES, uniform_rates
from ..data.routing import STAGES
from .routing import NAMES, headline
from .style import COLOURS, MARKERS, load_figure_class, save_figure

if TYPE_CHECKING:
    from ..data.routing import RoutingTrace

_UNIFORM = {"color": "#999999", "linestyle": "--", "label": "uniform routing"}


def write_trace_plot(trace: RoutingTrace, path: str | os.PathLike[str]) -> Path:
    """Draw each stage's policies, mean and range of the layers, and the unions.

    Raises OallamaError without matplotlib, or when the file cannot be written.
    """
    figure = load_figure_class()(figsize=(14, 4.8), layout="constrained")
    panels = figure.subplots(1, 3)
    for plot, stage in zip(panels, STAGES[::-1], strict=False):
        _hits(plot, trace, stage)
    _unions(panels[2], trace)
    figure.suptitle(f"{headline(trace)}; {trace.text}", fontsize=11, x=0.01, ha="left")
    return save_figure(figure, path)


def _hits(plot: Any, trace: RoutingTrace, stage: str) -> None:
    ks = range(1, trace.n_experts + 1)
    for number, (policy, rates) in enumerate(zip(POLICIES, trace.stages[stage].hits, strict=True)):
        colour = COLOURS[number]
        plot.plot(ks, 100 * rates.mean(axis=0), color=colour, label=NAMES[policy])
        plot.fill_between(ks, 100 * rates.min(axis=0), 100 * rates.max(axis=0), color=colour, alpha=0.12, linewidth=0)
    plot.plot(ks, 100 * uniform_rates(trace.n_experts), **_UNIFORM)
    plot.set_xlim(0, trace.n_experts)
    plot.set_ylim(0, 100)
    title = f"{stage}, {trace.stages[stage].n_tokens} tokens"
    _labelled(plot, title, "k, experts of a layer", "uses that hit in %, higher is better")


def _unions(plot: Any, trace: RoutingTrace) -> None:
    widest: tuple[int, ...] = ()
    for number, name in enumerate(STAGES[::-1]):
        stage = trace.stages[name]
        widest = max(widest, stage.widths, key=len)
        look = {"color": COLOURS[number], "marker": MARKERS[number], "markersize": 4, "label": name}
        plot.plot(stage.widths, stage.unions.mean(axis=0), **look)
    plot.plot(widest, [trace.uniform_union(n) for n in widest], **_UNIFORM)
    plot.set_xscale("log", base=2)
    plot.xaxis.set_major_formatter("{x:g}")
    plot.set_ylim(0, trace.n_experts * 1.02)
    _labelled(plot, "distinct experts of a batch", "tokens of the batch", "experts of a layer")


def _labelled(plot: Any, title: str, x: str, y: str) -> None:
    plot.set_title(title, fontsize=10, loc="left")
    plot.set_xlabel(x)
    plot.set_ylabel(y)
    plot.grid(alpha=0.3)
    plot.legend(frameon=False)
    plot.spines[["top", "right"]].set_visible(False)
