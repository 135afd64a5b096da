#!/usr/bin/env python3
"""The tables of numbers in README.md and docs/measured.md, made from bench/results: none is written by hand.

scripts/result_tables.py                      # prints them
scripts/result_tables.py [--write | --check]  # puts them into both files; 1 when these have others, or not all

A file has a table wherever it has the lines "<!-- table: NAME -->" and "<!-- end -->".
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path

import result_texts as texts
from result_experts import by_experts
from result_lines import MACHINES, Row, is_dirty, of_machine, read
from result_rows import CELLS, GROUPS

from oallama.bench.attention_cells import table

ROOT = Path(__file__).resolve().parents[1]
FILES = ("README.md", "docs/measured.md")
DIRTY = "†"  # behind the words of a row with lines from a tree with uncommitted changes
TABLE = re.compile(r"(<!-- table: ([\w -]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def by_machine(rows: Iterable[Row], files: bool = True) -> Iterator[str]:
    """What was measured, a column for every machine that was; files: and one of where it stands."""
    made = [(row, {name: _text(row, name) for name in MACHINES}) for row in rows]
    machines = [name for name in MACHINES if any(cells[name] for _, cells in made)]
    yield "| what | " + " | ".join([*machines, *(["where"] if files else [])]) + " |"
    yield "|---" * (len(machines) + 1 + files) + "|"
    for row, cells in made:
        where = [", ".join(f"`{file}.jsonl`" for file in row.files)] if files else []
        mark = f" {DIRTY}" if any(is_dirty(line) for file in row.files for line in read(file)) else ""
        yield f"| {row.words}{mark} | " + " | ".join([*(cells[name] or "-" for name in machines), *where]) + " |"


def _text(row: Row, machine: str) -> str:
    """Empty where nothing was measured on this machine."""
    lines = [of_machine(read(file), machine) for file in row.files]
    return row.text(*lines) if any(lines) else ""


def by_cell() -> Iterator[str]:
    """The cells of the loopback server with one host thread; the newest measurement of each."""
    cells = {
        (line["arch"], line["budget"], line["depth"]): f"{texts.ratio(line):.2f}x"
        for file in CELLS
        for line in of_machine(read(file), "EPYC")
        if line["device"] == "RPC" and line["n_threads"] == 1
    }
    columns = [(budget, depth) for depth in (0, 2048) for budget in ("40%", "80%")]
    heads = (f"{budget[:-1]} %, {f'depth {depth}' if depth else 'empty cache'}" for budget, depth in columns)
    yield "| loopback RPC server, one host thread | " + " | ".join(heads) + " |"
    yield "|---|" + "--:|" * len(columns)
    for shown in ("llama Q8_0", "minicpm3 Q8_0 (MLA)", "qwen2 Q4_0", "qwen3moe Q8_0"):
        arch = shown.split()[0]
        yield f"| {shown} | " + " | ".join(cells[(arch, *column)] for column in columns) + " |"


def by_attention() -> Iterator[str]:
    """One layer's attention on the Xeon: one token at two depths, prompts at the larger one."""
    shown = {(1, 4096), *((n_tokens, 16384) for n_tokens in (1, 32, 128, 512))}
    lines = [line for line in read("2026-11-25-attention-xeon-huge") if (line["n_tokens"], line["depth"]) in shown]
    yield from table(lines, read("2026-11-25-products"), read("2026-11-24-peak")[0]["gflop_s"])


def in_readme() -> list[Row]:
    return [row for row in chain(*GROUPS.values()) if row.in_readme]


TABLES: dict[str, Callable[[], Iterator[str]]] = {
    "cells": by_cell,
    "rows": lambda: by_machine(in_readme(), files=False),
    "experts": by_experts,
    "attention": by_attention,
    **{name: partial(by_machine, rows) for name, rows in GROUPS.items()},
}


def with_tables(text: str) -> str:
    """A document with its tables made anew."""

    def made(found: re.Match[str]) -> str:
        return found[1] + "\n".join(["", *TABLES[found[2]](), "", found[3]])

    return TABLE.sub(made, text)


def main() -> int:
    if sys.argv[1:] not in (["--write"], ["--check"]):
        for name, make in TABLES.items():
            print("\n".join([f"## {name}", "", *make(), ""]))
        return 0
    texts_of = {ROOT / file: (ROOT / file).read_text() for file in FILES}
    if unused := TABLES.keys() - {name for text in texts_of.values() for _, name, _ in TABLE.findall(text)}:
        print(f"no file has a place for: {', '.join(sorted(unused))}", file=sys.stderr)
        return 1
    made = {path: with_tables(text) for path, text in texts_of.items()}
    if sys.argv[1] == "--write":
        for path, text in made.items():
            path.write_text(text)
        return 0
    stale = [path.name for path, text in texts_of.items() if made[path] != text]
    if stale:
        print(f"{', '.join(stale)}: other numbers than bench/results: {sys.argv[0]} --write", file=sys.stderr)
    return int(bool(stale))


if __name__ == "__main__":
    sys.exit(main())
