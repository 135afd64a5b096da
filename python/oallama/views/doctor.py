"""What `oallama doctor` found, as a table and the commands that mend things."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Group
from rich.markup import escape
from rich.text import Text

from .style import table

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ..doctor.finding import Finding

_STYLES = {"ok": "green", "note": "yellow", "missing": "yellow", "broken": "bold red"}


def render_findings(findings: Sequence[Finding]) -> RenderableType:
    """A table, then for each finding that is not "ok" what follows and the command that mends it."""
    view = table()
    view.add_column("what", no_wrap=True)
    view.add_column("state", no_wrap=True)
    view.add_column("found", overflow="fold")
    for finding in findings:
        view.add_row(finding.name, Text(finding.state, style=_STYLES[finding.state]), escape(finding.found))
    parts: list[RenderableType] = [view]
    for finding in findings:
        if finding.effect:
            parts.append(Text(f"{finding.name}: {finding.effect}"))
        if finding.remedy:
            parts.append(Text(f"    {finding.remedy}", style="bold", no_wrap=True, overflow="ignore"))  # to be copied
    return Group(*parts)
