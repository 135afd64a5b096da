"""Compute buffers for the terminal: what they take, and how little they could."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from rich.table import Table

from ..data.budget import format_bytes
from .style import table

if TYPE_CHECKING:
    from ..planning.arenas import Arena


def render_arenas(arenas: Iterable[Arena], *, offline: bool) -> Table:
    """One row per graph and device; `offline` says which layout the plan asks for."""
    title = f"compute buffers, laid out {'offline' if offline else 'by ggml'}"
    shown = table(title)
    shown.add_column("device", no_wrap=True)
    for column in ("tokens", "logits", "needed", "ggml", "waste", "offline", "saved"):
        shown.add_column(column, justify="right", no_wrap=True)
    for a in arenas:
        sizes = [format_bytes(size) for size in (a.bound, a.online, a.offline)]
        shown.add_row(
            a.device,
            str(a.n_tokens),
            str(a.n_outputs),
            *sizes[:2],
            f"{a.waste:.1%}",
            sizes[2],
            f"{a.saved:.1%}",
        )
    return shown
