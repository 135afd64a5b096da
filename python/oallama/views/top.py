"""The models of a running server as a table: `oallama top`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..data.budget import format_bytes
from .style import table

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ..serving.live import ModelNow


def render_top(models: Sequence[ModelNow], title: str) -> RenderableType:
    """in/s, out/s: tokens of prompts and of answers per second. waits: the share of time that guests cost."""
    view = table(title, spare=("lent", "lost", "queue", "waits", "in/s"))
    view.add_column("model", no_wrap=True)
    for header in ("slots", "queue", "in/s", "out/s", "guests", "waits", "lost", "lent"):
        view.add_column(header, justify="right", no_wrap=True)
    for model in models:
        if model.n_slots is None:
            view.add_row(model.name, model.state, *["-"] * 7)
            continue
        view.add_row(
            model.name,
            f"{_number(model.n_busy)}/{model.n_slots}",
            _number(model.n_waiting),
            _rate(model.prompt_per_s),
            _rate(model.tokens_per_s),
            _guests(model),
            "-" if model.waited is None else f"{model.waited:.0%}",
            _number(model.n_lost),
            _lent(model),
        )
    return view


def _guests(model: ModelNow) -> str:
    if model.n_guests is not None:
        return f"{model.n_guests} away"
    return "-" if model.n_kept is None else f"{model.n_kept} here"


def _lent(model: ModelNow) -> str:
    if model.lent_bytes is None or model.used_bytes is None:
        return "-"
    return f"{format_bytes(model.used_bytes)} of {format_bytes(model.lent_bytes)}"


def _number(n: int | None) -> str:
    return "-" if n is None else str(n)


def _rate(per_s: float | None) -> str:
    return "-" if per_s is None else f"{per_s:.1f}" if per_s < 10 else f"{per_s:.0f}"
