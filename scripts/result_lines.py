"""Lines of bench/results, the machines they come from, and rows of tables that show them (scripts/result_tables.py)."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parents[1] / "bench" / "results"
CPUS = {"Intel(R) Xeon(R) Processor": "Xeon", "AMD EPYC": "EPYC"}
OLDER = "older EPYC"  # without AVX-512; lines before 2026-11-29 do not name instructions, and were on newer ones
GPU = "NVIDIA GPU"
MACHINES = (*CPUS.values(), OLDER, GPU)
Lines = list[dict[str, Any]]


@dataclass(frozen=True)
class Row:
    """A row of a table.

    files: names in bench/results, without .jsonl. text: of each file's lines from one machine, in order.
    in_readme: whether README.md has it too.
    """

    words: str
    files: tuple[str, ...]
    text: Callable[..., str]
    in_readme: bool = False


def read(file: str) -> Lines:
    return [json.loads(line) for line in (RESULTS / f"{file}.jsonl").read_text().splitlines()]


def of_machine(lines: Lines, machine: str) -> Lines:
    """Those of one machine: all lines where only a head names the CPU, else each line's own."""

    def cpus(value: Any) -> Iterator[str]:
        if isinstance(value, dict):
            for key, inner in value.items():
                yield from [cpu(value)] if key == "cpu" and isinstance(inner, str) else cpus(inner)

    named = [{GPU} if has_gpu(line) else set(cpus(line)) for line in lines]
    if set().union(*named) == {machine}:
        return lines
    return [line for line, cpu in zip(lines, named, strict=True) if cpu == {machine}]


def cpu(hardware: dict[str, Any]) -> str:
    found = CPUS[hardware["cpu"]]
    return OLDER if found == "EPYC" and "avx512f" not in hardware.get("instructions", ["avx512f"]) else found


def span(values: list[float], form: str) -> str:
    """The smallest and the largest, once if they read alike."""
    low, high = form.format(min(values)), form.format(max(values))
    return low if low == high else f"{low} to {high}"


def has_gpu(line: dict[str, Any]) -> bool:
    machine = line.get("machine") or {}
    return bool(machine.get("gpus") or machine.get("hardware", {}).get("gpus"))


def is_dirty(value: Any) -> bool:
    """Whether a line, or a part of it, says that the tree had uncommitted changes."""
    return isinstance(value, dict) and (value.get("dirty") is True or any(map(is_dirty, value.values())))
