"""Kinds of operators as tables: what each takes where, and how far the profile is off. 80 columns with two devices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.table import Table

from ..base.printing import seconds
from ..data.budget import format_bytes
from .style import table

if TYPE_CHECKING:
    from ..planning.in_place import InPlace
    from ..planning.operator_kinds import OperatorKind


def render_kinds(title: str, kinds: Sequence[OperatorKind]) -> Table:
    """A row per kind; with an accelerator also the time that a GB moved to it saves, and OATO's affinity."""
    devices = list(dict.fromkeys(name for kind in kinds for name in kind.seconds))
    saves = any(kind.saved is not None for kind in kinds)
    alike = Counter((kind.kind, kind.type) for kind in kinds)
    shown = table(title)
    shown.collapse_padding = True
    shown.add_column("kind", overflow="fold")
    for column in ("n", "bytes", *devices, *(("ms/GB", "affinity") if saves else ())):
        shown.add_column(column, justify="right", no_wrap=True)
    for kind in kinds:
        shape = "x".join(map(str, kind.ne)) if alike[kind.kind, kind.type] > 1 else ""
        cells = [
            _words(kind.kind, kind.type, shape),
            str(kind.number),
            format_bytes(kind.nbytes) if kind.nbytes else "-",
        ]
        cells += [_time(kind.seconds.get(name)) for name in devices]
        if saves:
            cells.append("-" if kind.saved is None else f"{1e3 * kind.saved:.1f}")
            cells.append("-" if kind.affinity is None else f"{kind.affinity:.2f}")
        shown.add_row(*cells)
    return shown


def render_in_place(title: str, rows: Sequence[InPlace]) -> Table:
    """A row per kind and device: the profile's seconds beside those in the model's own graph."""
    shown = table(title)
    shown.add_column("kind", overflow="fold")
    for column in ("device", "n", "profile", "in place", "error"):
        shown.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        error = "-" if row.error_percent is None else f"{row.error_percent:+.0f} %"
        shown.add_row(
            _words(row.kind, row.type),
            row.device,
            str(row.number),
            _time(row.predicted_s),
            _time(row.measured_s),
            error,
        )
    return shown


def _words(*parts: str) -> str:
    return " ".join(filter(None, parts))


def _time(s: float | None) -> str:
    """What is saved by computing in one piece is below zero."""
    return f"-{seconds(-s)}" if s is not None and s < 0 else seconds(s)
