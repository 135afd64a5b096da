"""Measured times with their intervals as SVG, beside what was predicted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from ..base.printing import seconds
from .style import COLOURS
from .templates import render

_WIDTH, _LEFT, _RIGHT, _ROW, _TOP = 960, 180, 330, 24, 6


@dataclass(frozen=True)
class Interval:
    """One row: seconds from `low` to `high` around `middle`. expected: what was predicted, None for nothing.

    group: rows of one group follow each other under its name. note: at the end of the row.
    """

    group: str
    name: str
    low: float
    middle: float
    high: float
    expected: float | None
    note: str = ""


def intervals_svg(rows: Sequence[Interval]) -> Markup:
    """All rows on one scale from zero, groups apart. Empty without rows."""
    if not rows:
        return Markup()
    longest = max(max(row.high, row.expected or 0.0) for row in rows)
    names = [*dict.fromkeys(row.name for row in rows)]

    def x(s: float) -> float:
        return round(_LEFT + (_WIDTH - _LEFT - _RIGHT) * s / longest, 2)

    drawn, y, group = [], float(_TOP), None
    for row in rows:
        if row.group != group:
            y += 0 if group is None else 8
            drawn.append({"heading": row.group, "y": y + 14})
            y, group = y + _ROW, row.group
        drawn.append(
            {
                "heading": "",
                "name": row.name,
                "y": y + _ROW / 2,
                "low": x(row.low),
                "middle": x(row.middle),
                "high": x(row.high),
                "expected": None if row.expected is None else x(row.expected),
                "colour": COLOURS[names.index(row.name) % len(COLOURS)],
                "text": f"{seconds(row.middle)} ({seconds(row.low)} to {seconds(row.high)}){row.note}",
            }
        )
        y += _ROW
    return render("intervals.svg", width=_WIDTH, height=y + 6, left=_LEFT, right=_WIDTH - _RIGHT, rows=drawn)
