"""A timeline for the terminal: a table per stage, a row per lane."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group
from rich.table import Table

from ..base.printing import seconds
from .style import table

if TYPE_CHECKING:
    from ..tracing.timeline import Stage, Timeline


def render_timeline(timeline: Timeline) -> Group:
    """Busy and idle time of every lane that did anything, bytes, their speed, and what overlapped."""
    return Group(*(_stage(timeline, stage) for stage in timeline.stages))


def _stage(timeline: Timeline, stage: Stage) -> Table:
    shown = table(f"{stage.name}, {seconds(stage.seconds)}")
    shown.add_column("lane", no_wrap=True)
    for name in ("busy", "idle", "MiB", "GB/s", "overlap"):
        shown.add_column(name, justify="right", no_wrap=True)
    for use in timeline.use(stage):
        if use.busy_s:
            copied = f"{use.nbytes / 2**20:.1f}" if use.nbytes else ""
            speed = f"{use.gb_per_s:.2f}" if use.gb_per_s else ""
            overlap = f"{use.overlap:.0%}" if use.nbytes or use.overlapped_s else ""
            busy = f"{seconds(use.busy_s)} {use.busy_s / stage.seconds:4.0%}"
            shown.add_row(use.lane, busy, seconds(use.idle_s), copied, speed, overlap)
    return shown
