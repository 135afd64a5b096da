"""How tables and pictures look, the same everywhere."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from ..errors import OallamaError

# Okabe and Ito's palette: told apart by colour-blind readers; markers tell them apart in grey print.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
MARKERS = "osD^vPX"


def table(title: str | None = None) -> Table:
    """An empty table that fits 80 columns."""
    return Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False)


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
