"""The table of plans of a mixture (scripts/result_tables.py)."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

from result_lines import MACHINES, of_machine, read, span

FILES = ("2026-11-25-experts", "2026-11-26-experts-epyc", "2026-11-25-experts-link", "2026-11-27-h100-experts")


def by_experts() -> Iterator[str]:
    """Plans of a mixture, by machine, routing and the share of its experts on the device."""
    rivals = {"exact": "whole tensors", "cpu-moe": "`--n-cpu-moe`, first layers", "cpu-moe-last": "last layers"}
    yield (
        "| machine | routing | experts' bytes on the device | experts divided | TPOT (predicted) | hits (expected) | "
        + " | ".join(f"against {name}" for name in rivals.values())
        + " | prompt of 64 |"
    )
    yield "|---|---|--:|---|--:|--:|" + "--:|" * (len(rivals) + 1)
    for file, machine in product(FILES, MACHINES):
        cells: dict[tuple[str, str, int], dict[str, dict[str, Any]]] = {}  # routing, type and link, share
        for line in of_machine(read(file), machine):
            if "share" in line and "chosen" in line:
                link = line.get("link", "loopback").replace("gbit", " Gbit/s")
                also = "" if link in ("", "loopback") else f", link of {link}"
                also += "" if line.get("type", "F16") == "F16" else f", {line['type']}"
                cells.setdefault((line["routing"], also, line["share"]), {})[line["planner"]] = line
        for (routing, also, share), plans in sorted(cells.items()):
            ours = next(line for line in plans.values() if line["chosen"])
            divided = "yes" if any(ours["held"]) else "no"
            hits = f"{ours['hits']:.0%} ({ours['expected_hits']:.0%})"
            tpot = f"{1e3 * ours['tpot_s']:.1f} ms ({1e3 * ours['predicted_tpot_s']:.1f})"
            faster = [f"{plans[name]['chosen_times_tpot_s']['value']:.2f}x" for name in rivals]
            prompts = span([plans[name]["chosen_times_ttft_s"]["value"] for name in rivals], "{:.2f}x")
            row = [machine, f"`{routing}`{also}", f"{share} %", divided, tpot, hits, *faster, prompts]
            yield "| " + " | ".join(row) + " |"
