"""A benchmark's rows as terminal tables."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from .style import table

MODEL_COLUMNS = 3  # the first ones tell the model, the same in every row


def print_rows(
    columns: Sequence[str], rows: Sequence[Sequence[str]], notes: Sequence[str], n_text: int, console: Console | None
) -> None:
    """Print rows with a line between tests, the model as the title, the notes below.

    n_text: columns that are aligned left. console: default the standard output.
    """
    console = console or Console()
    test = columns.index("test")
    view = Table(title=" | ".join(rows[0][:MODEL_COLUMNS]) if rows else None, title_justify="left")
    for i, name in enumerate(columns[MODEL_COLUMNS:], start=MODEL_COLUMNS):
        view.add_column(name, justify="left" if i < n_text else "right", no_wrap=i == test)
    for row, following in zip(rows, [*rows[1:], None], strict=True):
        view.add_row(*row[MODEL_COLUMNS:], end_section=following is not None and following[test] != row[test])
    console.print(view)
    for note in notes:
        console.print(note, style="dim", highlight=False)


def medians_table(columns: Sequence[str], rows: Sequence[Sequence[str]], notes: Sequence[str]) -> Group:
    """A table of few columns that fits 60: engine, test, numbers; the notes below."""
    view = table(spare=[name for name in columns if name.startswith("device")])
    view.add_column(columns[0], min_width=len("llama.cpp"))
    view.add_column(columns[1], no_wrap=True)
    for name in columns[2:]:
        view.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        view.add_row(*row)
    return Group(view, *(Text(line, style="dim") for line in notes))
