"""A benchmark's rows as a terminal table."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

MODEL_COLUMNS = 3  # the first ones tell the model, the same in every row


def print_rows(
    columns: Sequence[str], rows: Sequence[Sequence[str]], notes: Sequence[str], n_text: int, console: Console | None
) -> None:
    """Print rows with a line between tests, the model as the title, the notes below.

    n_text: columns that are aligned left. console: default the standard output.
    """
    console = console or Console()
    test = columns.index("test")
    table = Table(title=" | ".join(rows[0][:MODEL_COLUMNS]) if rows else None, title_justify="left")
    for i, name in enumerate(columns[MODEL_COLUMNS:], start=MODEL_COLUMNS):
        table.add_column(name, justify="left" if i < n_text else "right", no_wrap=i == test)
    for row, following in zip(rows, [*rows[1:], None], strict=True):
        table.add_row(*row[MODEL_COLUMNS:], end_section=following is not None and following[test] != row[test])
    console.print(table)
    for note in notes:
        console.print(note, style="dim", highlight=False)
