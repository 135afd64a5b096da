"""Results of the GPU suite as markdown tables: medians over rounds, for reading and for the README.

python bench/gpu/table.py FILE.jsonl [FILE.jsonl ..]
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

# Times of loads by engine: the same columns for every kind.
LOADS = ("predicted", "virtual", "oato", "deep", "streams", "polls")


def row(cells: Iterable[object]) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def ms(values: list[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{1e3 * statistics.median(known):.2f}" if known else "-"


def promised(plans: list[dict[str, Any]], line: dict[str, Any], name: str, prompt: str) -> tuple[str, str]:
    """TTFT and TPOT of the plan of this name in the same cell; "-" where it made no promise."""
    for plan in plans:
        same = all(
            plan.get(key) == line.get(key) for key in ("model", "budget", "depth") if key in line and key in plan
        )
        if same and plan.get("name") == name and "error" not in plan:
            tpot = plan["predicted_tpot_s"]
            nearest = min(tpot, key=lambda at: abs(int(at) - line["depth"] - int(prompt)))
            ttft = plan["predicted_ttft_s"].get(prompt)
            if line["depth"]:  # the promise is of the request that the plan is made for, a prompt of so many tokens
                parts = plan.get("predicted_parts_s", {}).get("prefill", {})
                ttft = sum(parts.values()) if parts and int(prompt) == line["prompt"] else None
            return ms([ttft]), ms([tpot[nearest]])
    return "-", "-"


def loads(lines: list[dict[str, Any]], what: str) -> list[str]:
    """A row per engine and prompt."""
    plans = [line for line in lines if line.get("what") == "plan"]
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for line in lines:
        if line.get("what") == what and "error" not in line:
            groups.setdefault((line["model"], line.get("budget"), line["depth"], line["name"]), []).append(line)
    head = "| model | engine | depth | prompt | loads | first TTFT ms | TTFT ms | predicted | TPOT ms | predicted |"
    out = [f"## {what}", "", head, row(["---"] * 10)]
    for (model, budget, depth, name), group in groups.items():
        for prompt in group[0]["ttft_s"]:
            at = int(prompt) == group[0]["prompt"]
            ttft, tpot = promised(plans, group[0], name, prompt)
            out.append(
                row((
                    model, f"{budget} {name}" if budget else name, depth, prompt, len(group),
                    ms([line["first_ttft_s"] for line in group]) if at else "-",
                    ms([line["ttft_s"][prompt] for line in group]), ttft,
                    ms([line["tpot_s"] for line in group]) if at else "-", tpot if at else "-",
                ))
            )  # fmt: skip
    return [*out, ""]


def others(lines: list[dict[str, Any]]) -> list[str]:
    """What is no load, and every error, as it is."""
    out = []
    for line in lines:
        if "error" in line or line.get("what") not in (*LOADS, "plan"):
            out.append(json.dumps({k: v for k, v in line.items() if k not in ("machine", "argv", "time")}))
    return [*out, ""]


def main() -> None:
    lines = [json.loads(text) for path in sys.argv[1:] for text in Path(path).read_text().splitlines()]
    for what in LOADS:
        if any(line.get("what") == what for line in lines):
            print("\n".join(loads(lines, what)))
    print("\n".join(others(lines)))


if __name__ == "__main__":
    main()
