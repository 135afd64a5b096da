"""Every way to generate with and without a draft: bytes and predicted seconds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.text import Text

from ..base.printing import seconds
from ..data.budget import format_bytes
from ..data.plan import HOST
from .style import table

if TYPE_CHECKING:
    from ..drafts import Joint


def render_drafts(joint: Joint) -> RenderableType:
    """The table of `--explain`, the way to take first; fits 80 columns with one accelerator.

    n: tokens guessed at a time. tokens: expected of a step. Bytes are of both models.
    """
    work = joint.workload
    shown = table(f"drafts, predicted for {work.n_prompt} + {work.n_generate} tokens behind {work.depth}")
    names = dict.fromkeys(name for pair in joint.pairs.values() for name in pair.nbytes if name != HOST)
    shown.add_column("draft on", no_wrap=True)
    for column in ("n", "tokens", "step", "token", "request", *names, HOST):
        shown.add_column(column, justify="right", no_wrap=True)
    for choice in joint.choices:
        nbytes = joint.pairs[choice.pair].nbytes
        shown.add_row(
            joint.pairs[choice.pair].draft_on or "-",
            str(choice.n) if choice.n else "-",
            f"{choice.tokens:.2f}",
            seconds(choice.step_s),
            seconds(choice.token_s),
            seconds(choice.request_s),
            *(format_bytes(nbytes[name]) if nbytes.get(name) else "-" for name in (*names, HOST)),
            style="bold" if choice is joint.best else "",
        )
    left_out = [Text(f"{name} is left out: {error}", style="dim") for name, error in joint.failed.items()]
    return Group(shown, *left_out, Text(str(joint.acceptance)))
