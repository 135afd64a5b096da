"""Plans of a grid of models, budgets and machines, to see whether a change of the planner changed any.

python bench/planner_grid.py --out BEFORE.jsonl; (the change); python bench/planner_grid.py --out AFTER.jsonl
python bench/planner_grid.py --compare BEFORE.jsonl AFTER.jsonl

Published shapes in sparse files and profiles computed from datasheets. One JSON line per case: what was chosen, and of
every candidate its seconds, context and the hash of its backend map. --compare prints what differs and ends with 1.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

from oallama.bench.script import read, record
from oallama.data.plan import PlacementPlan
from oallama.engine.load_settings import Settings
from oallama.errors import OallamaError
from oallama.loading import autoplan
from oallama.loading.autoplan import Choices
from oallama.modelmaker import make_sparse_model
from oallama.planning import Workload
from oallama.profiling.datasheet import Datasheet, make_profile

# shape, file type, contexts
MODELS = (
    ("llama3-8b", "Q4_K_M", (8192,)),
    ("minicpm3-4b", "Q8_0", (4096,)),
    ("qwen3-30b-a3b", "Q4_K_M", (8192,)),
    ("qwq-32b", "Q4_K_M", (16384,)),
    ("qwen3-235b-a22b", "Q4_K_M", (16384,)),
)
BUDGETS = {
    "llama3-8b": ("2GiB", "4GiB", "60%"),
    "minicpm3-4b": ("1500MiB", "3GiB"),
    "qwen3-30b-a3b": ("4GiB", "10GiB", "50%"),
    "qwq-32b": ("8GiB", "16GiB"),
    "qwen3-235b-a22b": ("22GiB", "60GiB"),
}
SHEETS = ("rtx4090-xeon4314", "rtx3060-ddr4")
SAME = 1e-9  # relative: seconds are added up in another order


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--compare", type=Path, nargs=2, metavar=("BEFORE", "AFTER"))
    parser.add_argument("--models", default=",".join(m[0] for m in MODELS))
    options = parser.parse_args()
    if options.compare:
        return compared(*map(read, options.compare))
    record(cases(options.models.split(",")), options.out)
    return 0


def cases(shapes: list[str]) -> Iterator[dict[str, Any]]:
    for (shape, file_type, contexts), name in product(MODELS, SHEETS):
        if shape not in shapes:
            continue
        sheet = Datasheet.load(name)
        with tempfile.TemporaryDirectory() as folder:
            path = make_sparse_model(Path(folder) / f"{shape}.gguf", shape=shape, file_type=file_type)
            for n_ctx, budget, n_prompt in product(contexts, BUDGETS[shape], (64, 512)):
                settings = Settings(n_ctx=n_ctx, n_threads=sheet.cpu.cores)
                graph = autoplan.read_graph(path, settings)
                profile = make_profile(graph, sheet)
                workload = Workload(n_prompt, 128, n_ctx // 4)
                choices = Choices(profile=profile, elsewhere=True, workload=workload, all_candidates=True)
                case = {"shape": shape, "budget": budget, "n_ctx": n_ctx, "n_prompt": n_prompt, "datasheet": name}
                start = time.perf_counter()
                try:
                    found = autoplan.candidates(path, graph, budget, settings, choices)
                except OallamaError as error:
                    yield {**case, "error": str(error)}
                    continue
                yield {
                    **case,
                    "wall_s": time.perf_counter() - start,
                    "chosen": next(iter(found.plans)),
                    "plans": {planner: described(plan) for planner, plan in found.plans.items()},
                    "failed": sorted(found.failed),
                    "skipped": {planner: bound for planner, bound in getattr(found, "skipped", {}).items()},
                }


def described(plan: PlacementPlan) -> dict[str, Any]:
    table = hashlib.sha256(plan.to_backend_map().encode()).hexdigest()[:12]
    context = [plan.context.n_ubatch, plan.context.n_batch, plan.context.flash_attn]
    return {"request_s": plan.predicted.request_s, "table": table, "context": context}


def compared(before: list[dict[str, Any]], after: list[dict[str, Any]]) -> int:
    keys = ("shape", "budget", "n_ctx", "n_prompt", "datasheet")
    there = {tuple(line[key] for key in keys): line for line in after}
    chosen = plans = skipped = 0
    for line in before:
        case = tuple(line[key] for key in keys)
        other = there[case]
        if "error" in line or "error" in other:
            if line.get("error") != other.get("error"):
                print(*case, "|", line.get("error"), "|", other.get("error"))
            continue
        chosen += _differs(case, "chosen", line["plans"][line["chosen"]], other["plans"].get(line["chosen"]))
        chosen += line["chosen"] != other["chosen"]
        for planner, plan in line["plans"].items():
            if planner in other["skipped"]:
                skipped += 1
            else:
                plans += _differs(case, planner, plan, other["plans"].get(planner))
    n = len(before)
    print(json.dumps({"cases": n, "chosen_differ": chosen, "candidates_differ": plans, "skipped": skipped}))
    return int(bool(chosen or plans))


def _differs(case: tuple[Any, ...], planner: str, one: dict[str, Any], two: dict[str, Any] | None) -> bool:
    same = two is not None and one["table"] == two["table"] and one["context"] == two["context"]
    same = same and two is not None and abs(one["request_s"] / two["request_s"] - 1) <= SAME
    if not same:
        print(*case, "|", planner, "|", one, "|", two)
    return not same


if __name__ == "__main__":
    sys.exit(main())
