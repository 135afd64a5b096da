"""What every program of bench/ shares: its arguments, its dated file of results, and how lines of JSON get there."""

from __future__ import annotations

import argparse
import gzip
import json
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from .machine import REPOSITORY

RESULTS = REPOSITORY / "bench" / "results"
Lines = list[dict[str, Any]]


def arguments(description: str | None, name: str, suffix: str = ".jsonl") -> argparse.ArgumentParser:
    """A parser with --out, by default bench/results/DATE-NAME with the date of today (UTC)."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    out = RESULTS / f"{time.strftime('%F', time.gmtime())}-{name}{suffix}"
    shown = Path("bench/results", out.name)
    parser.add_argument("-o", "--out", type=Path, default=out, help=f"results are appended (default: {shown})")
    return parser


def words(text: str) -> list[str]:
    """An argument of several: "a,b" -> ["a", "b"]."""
    return text.split(",")


def numbers(text: str) -> tuple[int, ...]:
    """An argument of several: "1,2" -> (1, 2)."""
    return tuple(map(int, text.split(",")))


def record(
    lines: Iterable[dict[str, Any]],
    out: Path,
    *,
    head: dict[str, Any] | None = None,
    each: dict[str, Any] | None = None,
    quiet: bool = False,
) -> Lines:
    """Append measurements to `out` as they come, one JSON object a line, and return them.

    head: a line before them. each: what every line ends with. Both are for the machine, as `describe` has it. Every
    measurement is also printed, without long lists and objects, unless quiet.
    """
    found: Lines = [] if head is None else [head]
    with out.open("a", encoding="utf-8") as file:
        for line in found:
            file.write(json.dumps(line) + "\n")
        for line in lines:
            found.append(line)
            file.write(json.dumps({**line, **(each or {})}) + "\n")
            file.flush()  # a run that is cut leaves what came before
            if not quiet:
                print(short(line), flush=True)
    return found


def short(line: dict[str, Any]) -> str:
    """A measurement to be read as it comes: without lists and objects of eight and more."""
    return json.dumps({k: v for k, v in line.items() if not isinstance(v, (list, dict)) or len(v) < 8})


def read(path: Path) -> Lines:
    """The lines of a recorded file, which may be compressed (.gz)."""
    content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    return [json.loads(line) for line in content.decode().splitlines()]


def note(text: object) -> None:
    """Say how far a run is, on standard error."""
    print(text, file=sys.stderr, flush=True)


def progress(done: int, total: int, what: str) -> None:
    """For run_bench and others that report steps."""
    note(f"{done}/{total} {what}")
