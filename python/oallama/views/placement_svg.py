"""The map of a plan as SVG: for READMEs, and inside of reports and of the server's page."""

from __future__ import annotations

from dataclasses import dataclass

from markupsafe import Markup

from ..data.plan import HOST
from .placement_map import KV_CACHE, MapCell, PlacementMap
from .style import COLOURS
from .templates import render

_MOST, _LEAST = 960, 520  # the width
_LEFT, _RIGHT, _TOP = 84, 12, 8  # what labels take on the left, at least
_ROW, _CELL_HEIGHT = 22, 18
_MOST_CELL, _GAP = 34.0, 1.5
_TITLE = 26
_LETTER = 6.6  # widths of a letter in the legend, about
_WORDS = {HOST: "CPU", "upload": "CPU, uploaded for large batches", "stream": "CPU, streamed"}
_SPLIT = "split: the coloured part on the accelerator, both compute at once"


@dataclass(frozen=True)
class _At:
    """A cell and where it is drawn."""

    cell: MapCell
    x: float
    y: float
    w: float
    h: float
    column: int
    row: int


def placement_svg(drawn: PlacementMap, *, title: str = "", standalone: bool = True) -> Markup:
    """standalone: a file of its own, with a title and a ground; else for a page, which has both and shows facts."""
    left = max(_LEFT, round(12 + _LETTER * max(map(len, drawn.labels))))
    top = _TOP + (_TITLE if standalone and title else 0)
    step = min(_MOST_CELL, (_MOST - left - _RIGHT) / max(1, drawn.n_layers))
    width = round(max(_LEAST, left + drawn.n_layers * step + _RIGHT))
    w = round(step - _GAP, 2)
    ys = {row: top + i * _ROW for i, row in enumerate(drawn.rows)}
    inside = [
        _At(c, round(left + c.column * step, 2), ys[c.row], w, _CELL_HEIGHT, c.column, drawn.rows.index(c.row))
        for c in drawn.cells
        if c.column is not None
    ]
    axis_y = top + len(drawn.rows) * _ROW + 10
    outside, y = _outside(drawn, axis_y + 12, left)
    legend, below = _legend(drawn, y + _ROW + 8, left, width)
    every = -(-drawn.n_layers // 16) if drawn.n_layers > 16 else 1
    ticks = [{"layer": i, "x": round(left + i * step + w / 2, 2)} for i in range(0, drawn.n_layers, every)]
    number = {device: i % len(COLOURS) for i, device in enumerate(d for d in drawn.devices if d != HOST)}
    return render(
        "placement.svg",
        width=width,
        height=below + 6,
        left=left,
        size=Markup(f'width="{width}" height="{below + 6}"' if standalone else f'style="max-width:{width}px"'),
        label=f"Where the weights of {drawn.n_layers} layers are: {', '.join(drawn.devices)}",
        standalone=standalone,
        title=title,
        colours=COLOURS,
        number=number,
        rows=[{"name": label, "y": ys[row]} for label, row in zip(drawn.labels, drawn.rows, strict=True)],
        cells=[*inside, *outside],
        ticks=ticks,
        axis_y=axis_y,
        outsides=[{"name": at.cell.row, "x": at.x, "y": at.y} for at in outside],
        legend=legend,
    )


def _outside(drawn: PlacementMap, y: float, left: float) -> tuple[list[_At], float]:
    """What belongs to no layer, in a line of its own."""
    found: list[_At] = []
    x = left
    for cell in drawn.cells:
        if cell.column is None:
            x += _LETTER * len(cell.row) + 8 if found else 0
            found.append(_At(cell, x, y, _CELL_HEIGHT, _CELL_HEIGHT, len(found), len(drawn.rows)))
            x += _CELL_HEIGHT + 16
    return found, y


def _legend(drawn: PlacementMap, y: float, left: float, width: float) -> tuple[list[dict[str, object]], float]:
    """Entries in lines that fit, and where the last line ends."""
    accelerator = next((d for d in drawn.devices if d != HOST), HOST)
    entries: list[dict[str, object]] = []
    x = left
    for home in drawn.homes:
        text = _SPLIT if home == "split" else _WORDS.get(home, home)
        need = 22 + _LETTER * len(text) + 18
        if entries and x + need > width - _RIGHT:
            x, y = left, y + _ROW
        share = {"split": 0.6}.get(home, float(home in drawn.devices and home != HOST))
        device = accelerator if home == "split" else home
        entries.append({"cell": MapCell("", None, KV_CACHE, home, device, share, ()), "x": x, "y": y, "text": text})
        x += need
    return entries, y + _CELL_HEIGHT
