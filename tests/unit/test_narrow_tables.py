"""Tables on narrow terminals: no number is cut, columns move together and then leave."""

from __future__ import annotations

import io
from collections.abc import Sequence

import pytest
from rich.console import Console, RenderableType

from oallama.doctor.finding import Finding
from oallama.views.bench_table import medians_table
from oallama.views.doctor import render_findings
from oallama.views.style import table

COLUMNS = ("engine", "test", "TTFT", "TPOT", "device MiB", "vs llama.cpp")
ROWS = [
    ("llama.cpp CPU -fa 1", "64+16 @ 4096", "9.3 ms", "622.1 µs", "12.0", "baseline"),
    ("oallama", "64+16 @ 4096", "105.3 ms", "571.7 µs", "1234.5", "12.75x / 1.09x"),
]


def drawn(what: RenderableType, width: int) -> list[str]:
    console = Console(width=width, file=io.StringIO())
    console.print(what, crop=False)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


@pytest.mark.parametrize("width", [60, 64, 70, 80, 120])
def test_a_benchmark_keeps_its_engines_and_numbers(width: int) -> None:
    lines = drawn(medians_table(COLUMNS, ROWS, []), width)
    assert max(map(len, lines)) <= width
    words = {word for line in lines for word in line.split()}
    wanted = {word for cell in (*COLUMNS, *(cell for row in ROWS for cell in row)) for word in cell.split()}
    assert wanted - words <= {"device", "MiB", "12.0", "1234.5"}
    assert wanted <= words or width < 80


def numbers(n: int, spare: Sequence[str] = ()) -> RenderableType:
    shown = table(spare=spare)
    for i in range(n):
        shown.add_column(f"col{i}", justify="right", no_wrap=True)
    shown.add_row(*("123456",) * n)
    return shown


def test_columns_move_together_before_one_leaves() -> None:
    wide, close, fewer = (drawn(numbers(4, ["col1"]), width) for width in (60, 30, 26))
    assert "col1" in wide[1] and "col1" in close[1] and max(map(len, close)) <= 30 < max(map(len, wide))
    assert fewer[1].split() == ["col0", "col2", "col3"] and fewer[3].split() == ["123456"] * 3


def test_a_command_that_mends_is_not_cut() -> None:
    command = "pip install " + " ".join(f"'oallama[extra{i}]'" for i in range(9))
    assert f"    {command}" in drawn(render_findings([Finding("packages", "missing", "none", "slow", command)]), 40)
