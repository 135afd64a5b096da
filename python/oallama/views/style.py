"""How tables and pictures look, the same everywhere."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.segment import Segment
from rich.table import Table

from ..errors import OallamaError

# Okabe and Ito's palette: told apart by colour-blind readers; markers tell them apart in grey print.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
MARKERS = "osD^vPX"
_CLOSER = ((0, 1, 0, 0), (0, 0, 0, 0))  # padding; the box has a space between columns, too
_CUT = "…"  # what rich puts at the end of a cell that is too long


class FittingTable(Table):
    """A table that leaves out columns rather than cut what is in them. spare: their headers, the first to go first.

    Before that its columns move together. Headers break between words.
    """

    spare: tuple[str, ...] = ()

    def add_column(self, header: RenderableType = "", *more: Any, **options: Any) -> None:
        words = str(header).split()
        super().add_column(header, *more, **{"min_width": max(map(len, words), default=None)} | options)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines: list[Segment] = []
        for shown in self._narrower():
            lines = shown._lines(console, options)
            if _width(lines) <= options.max_width and shown._is_whole(lines):
                break
        return lines

    def _is_whole(self, lines: Sequence[Segment]) -> bool:
        """Whether nothing is cut, and no column has vanished."""
        text = "".join(segment.text for segment in lines)
        return _CUT not in text and all(word in text for column in self.columns for word in str(column.header).split())

    def _narrower(self) -> Iterator[FittingTable]:
        """This table and ever narrower ones."""
        shown = self
        yield shown
        for padding in _CLOSER:
            shown = copy(shown)
            shown.padding = padding
            yield shown
        for name in self.spare:
            left = [column for column in shown.columns if column.header != name]
            shown = copy(shown)
            shown.columns = [replace(column, _index=i) for i, column in enumerate(left)]
            yield shown

    def _lines(self, console: Console, options: ConsoleOptions) -> list[Segment]:
        return [piece for piece in super().__rich_console__(console, options) if isinstance(piece, Segment)]


def _width(lines: Sequence[Segment]) -> int:
    return max(map(Segment.get_line_length, Segment.split_lines(lines)), default=0)


def table(title: str | None = None, spare: Sequence[str] = ()) -> FittingTable:
    """An empty table that fits 80 columns. spare: headers of columns that narrower terminals do without."""
    made = FittingTable(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False)
    made.spare = tuple(spare)
    return made


def load_figure_class() -> Any:
    """matplotlib's Figure.

    Raises:
        OallamaError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise OallamaError("pictures need matplotlib: pip install oallama[plot]") from None
    return Figure


def save_figure(figure: Any, path: str | os.PathLike[str]) -> Path:
    """Write a matplotlib figure as a PNG, folders included.

    Raises:
        OallamaError: the path cannot be written.
    """
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150, format="png")
    except OSError as error:
        raise OallamaError(f"cannot write the picture {path}: {error.strerror}") from None
    return Path(path)
