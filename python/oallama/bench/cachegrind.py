"""What valgrind's cachegrind counted, and what it says of one attention operator."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .attention_cells import Cell
from .script import Lines

LINE_BYTES = 64  # of a cache; bench/attention_counts.py asks for such


def totals(text: str) -> dict[str, int]:
    """A file of cachegrind's as {event: count}, of the whole program.

    Ir: instructions; Dr, Dw: reads and writes of data; D1mr, DLmr and so on: those that missed the first and the last
    level.

    Raises:
        ValueError: the file has no totals, or not one for every event.
    """
    found = dict(line.split(": ", 1) for line in text.splitlines() if line.startswith(("events: ", "summary: ")))
    names, numbers = found.get("events", "").split(), found.get("summary", "").split()
    if not names or len(names) != len(numbers):
        raise ValueError(f"expected totals of cachegrind, got {len(numbers)} numbers for {len(names)} events")
    return dict(zip(names, map(int, numbers), strict=True))


def of_operator(cell: Cell, without: dict[str, int], computed: dict[str, int]) -> dict[str, Any]:
    """What one operator took: the counts of a program that computed it less those of one that only made it ready.

    Bytes are of cache lines that came from beyond the last level, for reads and for writes. `times_kv` is against K and
    V read once.
    """
    events = {name: count - without[name] for name, count in computed.items()}
    read, written = (LINE_BYTES * events[name] for name in ("DLmr", "DLmw"))
    return {
        "instructions": events["Ir"],
        "instructions_per_value": round(events["Ir"] / cell.n_values, 2),
        "instructions_per_multiply_add": round(events["Ir"] / cell.n_multiply_adds, 3),
        "read_bytes": read,
        "written_bytes": written,
        "kv_bytes": round(cell.kv_bytes),
        "times_kv": round(read / cell.kv_bytes, 2),
        "events": events,
    }


def table(lines: Lines) -> Iterator[str]:
    """A table in Markdown of lines that bench/attention_counts.py recorded."""
    yield "| cache | query tokens, depth | kernel | instructions per value | per multiply-add | read from beyond L2 |"
    yield "|---|---|---|--:|--:|--:|"
    for line in lines:
        kernel = f"ggml {line['form']}" if line["kernel"] == "ggml" else f"ours, {line['kernel'].split()[1]}"
        cells = [line["cache"], f"{line['n_tokens']}, {line['depth']}", kernel]
        cells += [f"{line['instructions_per_value']:.2f}", f"{line['instructions_per_multiply_add']:.3f}"]
        yield f"| {' | '.join(cells)} | {line['times_kv']:.2f}x of K and V |"
