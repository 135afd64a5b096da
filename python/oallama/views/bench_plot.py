"""TTFT and TPOT over a sweep as a PNG; needs matplotlib (pip install oallama[plot])."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..base.printing import model_name
from ..errors import OallamaError
from .style import COLOURS, MARKERS, load_figure_class, save_figure

if TYPE_CHECKING:
    from ..bench.results import Result

PANELS = (("ttft_s", "TTFT"), ("tpot_s", "TPOT"))
AXES = (("prompt", "prompt tokens"), ("depth", "depth (tokens in the cache)"), ("gen", "generated tokens"))


def write_plot(results: Sequence[Result], path: str | os.PathLike[str]) -> Path:
    """Draw medians as lines or, with a single point, as dots; bars span the fastest to the slowest run.

    The axis is whichever of prompt, depth and generated tokens has the most values; each combination of the others
    gets a row of panels. Raises OallamaError without matplotlib or without samples.
    """
    figure_class = load_figure_class()
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    measured = [r for r in results if r.samples]
    if not measured:
        raise OallamaError("no results to plot: every engine failed")
    cells = sorted({r.cell for r in measured})
    counts = [len({getattr(c, name) for c in cells}) for name, _ in AXES]
    axis, label = AXES[counts.index(max(counts))]
    others = [name for name, _ in AXES if name != axis]
    facets = sorted({tuple(getattr(c, name) for name in others) for c in cells})
    engines = list(dict.fromkeys(r.engine for r in measured))

    figure = figure_class(figsize=(11, 1.3 + 3.6 * len(facets)), layout=ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.08))
    grid = figure.subplots(len(facets), len(PANELS), squeeze=False)
    for row, facet in zip(grid, facets, strict=True):
        chosen = [r for r in measured if tuple(getattr(r.cell, name) for name in others) == facet]
        for plot, (metric, title) in zip(row, PANELS, strict=True):
            _panel(plot, chosen, engines, axis, metric)
            plot.set_title(f"{title} ({_facet_name(others, facet)})", fontsize=10, loc="left")
            plot.set_xlabel(label)
            plot.set_ylabel(f"{title} in ms, lower is better")
    handles, names = _legend(grid)
    figure.legend(handles, names, loc="outside lower center", ncols=min(3, len(names)), frameon=False)
    figure.suptitle(_title(measured), fontsize=11, x=0.01, ha="left")
    return save_figure(figure, path)


def _panel(plot: Any, results: Sequence[Result], engines: Sequence[str], axis: str, metric: str) -> None:
    ticks = sorted({getattr(r.cell, axis) for r in results})
    for number, engine in enumerate(engines):
        own = sorted((r for r in results if r.engine == engine), key=lambda r: r.cell)
        points = [(ticks.index(getattr(r.cell, axis)), [v * 1e3 for v in r.values(metric)]) for r in own]
        points = [(x, values) for x, values in points if values]
        if not points:
            continue
        # Ticks are evenly spaced, as sweeps double; a small shift keeps the bars of equal engines apart.
        shift = 0.06 * (number - (len(engines) - 1) / 2)
        middle = [_median(values) for _, values in points]
        low = [m - min(values) for m, (_, values) in zip(middle, points, strict=True)]
        high = [max(values) - m for m, (_, values) in zip(middle, points, strict=True)]
        plot.errorbar(
            [x + shift for x, _ in points],
            middle,
            yerr=(low, high),
            label=_engine_name(own[0]),
            color=COLOURS[number % len(COLOURS)],
            marker=MARKERS[number % len(MARKERS)],
            markersize=5,
            linewidth=1.6,
            capsize=3,
        )
    plot.set_xticks(range(len(ticks)), [str(t) for t in ticks])
    plot.set_xlim(-0.5, len(ticks) - 0.5)
    plot.set_ylim(bottom=0)
    plot.grid(axis="y", alpha=0.3)
    plot.spines[["top", "right"]].set_visible(False)


def _median(values: Sequence[float]) -> float:
    middle = sorted(values)[(len(values) - 1) // 2 : len(values) // 2 + 1]
    return sum(middle) / len(middle)


def _engine_name(result: Result) -> str:
    return f"{result.engine} ({result.placement})" if result.placement else result.engine


def _facet_name(others: Sequence[str], facet: tuple[int, ...]) -> str:
    names = dict(zip(others, facet, strict=True))
    return ", ".join(f"{name} {value}" for name, value in names.items())


def _legend(grid: Any) -> tuple[list[Any], list[str]]:
    """Every engine once, also one that is missing from some panels."""
    found: dict[str, Any] = {}
    for plot in grid.flat:
        for handle, name in zip(*plot.get_legend_handles_labels(), strict=True):
            found.setdefault(name, handle)
    return list(found.values()), list(found)


def _title(results: Sequence[Result]) -> str:
    loaded, environment = results[0].loaded, results[0].environment
    hardware = environment.get("hardware", {})
    model = model_name(loaded.model["description"], loaded.model["n_params"]) if loaded else ""
    parts = [model, *(g["name"] for g in hardware.get("gpus", ()))]
    parts += [hardware.get("cpu", ""), f"{max(len(r.samples) for r in results)} runs, median with min and max"]
    return "  |  ".join(part for part in parts if part)
