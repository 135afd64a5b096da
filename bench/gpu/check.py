"""Whether a rehearsal ran everything: every stage ended well and left each kind of line, with the machine's facts.

python bench/gpu/check.py RESULTS

Prints a table, and what only a GPU can run. Ends with 1 if anything is missing.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from common import ROOT

# Kinds of lines ("what") by stage. Those of bench/device_allreduce.py and bench/experts.py have none.
KINDS: dict[str, tuple[str, ...]] = {
    "preflight": ("preflight",),
    "stock": ("llama-bench",),
    "ledger": ("ledger",),
    "profile": ("profile",),
    "predicted": ("plan", "predicted"),
    "virtual": ("virtual",),
    "oato": ("plan", "oato"),
    "budgets": ("plan", "oato"),
    "experts": (),
    "deep": ("plan", "deep"),
    "streams": ("link", "streams", "stream rate"),
    "weave": ("polls",),
    "ranks": (),
    "memcheck": ("memcheck",),
    "times": ("plan", "times"),
}
NEEDS_A_GPU = {
    "engine": "the build for CUDA (OALLAMA_CUDA=OFF tries its steps by hand); bench/weave_cuda.py --build: parsed only",
    "ready": "building in a later call; a carried engine is packed and unpacked by pack",
    "tests": "-m cuda: collected only",
    "weave": "bench/weave_cuda.py --library: parsed only; polls run on the CPU's receiver",
    "times": "kernels that CUPTI sees; a rehearsal has none",
    "memcheck": "compute-sanitizer: its command runs without it",
}


def limits() -> list[tuple[int, str]]:
    table = subprocess.run([ROOT / "scripts/gpu_suite.sh", "--limits"], capture_output=True, text=True, check=True)
    return [(int(call), stage) for call, stage, _ in map(str.split, table.stdout.splitlines())]


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def faults(stage: str, found: list[dict[str, Any]]) -> list[str]:
    """What is wrong with a stage's lines. A plan may be refused: not every planner applies to a tiny model."""
    if stage not in KINDS:
        return []
    kinds = {line.get("what") for line in found}
    wrong = [f"no line {kind!r}" for kind in KINDS[stage] if kind not in kinds]
    wrong += [f"{line['what']}: {line['error']}" for line in found if "error" in line and line["what"] != "plan"]
    wrong += [
        f"unfinished: {line['unfinished']}" for line in found if line.get("what") == "end" and not line["complete"]
    ]
    if not found:
        wrong.append("no lines")
    for line in found:
        machine = line.get("machine", {})
        facts = {**machine, **machine.get("hardware", {})}
        if not {"gpus", "cpu", "commit"} <= set(facts):
            wrong.append(f"a line without the machine: {line.get('what')}")
    return wrong


def main() -> int:
    folder = Path(sys.argv[1])
    summary = {(line["call"], line["stage"]): line for line in lines(folder / "summary.jsonl")}
    bad = 0
    for call, stage in limits():
        said = summary.get((call, stage), {"rc": None, "seconds": 0, "note": "not run"})
        wrong = [] if said["rc"] == 0 else [f"rc {said['rc']} {said['note']}"]
        wrong += faults(stage, lines(folder / f"{stage}.jsonl"))
        bad += bool(wrong)
        print(f"{call} {stage:10} {said['seconds']:4} s  {'; '.join(wrong) or 'ok'}")
    print("needs a GPU, not rehearsed:", *(f"  {stage}: {what}" for stage, what in NEEDS_A_GPU.items()), sep="\n")
    print(f"rehearsal: {bad} stages with faults" if bad else "rehearsal: every stage ran to its end")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
