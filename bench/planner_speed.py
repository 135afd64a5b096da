"""How long the exact planner takes on large models, and what it proves.

python bench/planner_speed.py [--out FILE.jsonl] [--repeats 3]

Published shapes in sparse files (no weight is stored), a profile computed from a datasheet, dry runs on a
stand-in device. One JSON line per model and planner: the seconds of everything
(medians), of them in dry runs, and the gap that was proven. Reading the model's graph is timed apart.
A mixture is planned without and with a routing trace, whose choices are made up.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from oallama.bench.machine import describe
from oallama.bench.script import arguments, record
from oallama.data.operators import OperatorGraph
from oallama.data.routing import STAGES, Routers, RoutingTrace, StageRouting
from oallama.engine import skeleton
from oallama.engine.load_settings import Settings
from oallama.engine.routers import routers_of
from oallama.loading import autoplan
from oallama.loading.autoplan import Choices
from oallama.loading.dry_run import known
from oallama.loading.routing_traces import keep_trace
from oallama.modelmaker import make_sparse_model
from oallama.profiling.datasheet import Datasheet, make_profile

# shape, file type, budget, context
MODELS = (("qwq-32b", "Q4_K_M", "16GiB", 16384), ("qwen3-235b-a22b", "Q4_K_M", "22GiB", 16384))
PLANNERS = ("exact", "auto")
TRACED = 1024  # tokens


def made_up(name: str, routers: Routers, graph: OperatorGraph) -> RoutingTrace:
    """A trace in which few experts of a layer take most uses, other ones in each layer."""
    rng = np.random.default_rng(1)
    layers = tuple(sorted({int(t.name.split(".")[1]) for t in graph.tensors if "_exps" in t.name}))
    n_used = next(op.n_used for op in graph.operators(1) if op.op == "MUL_MAT_ID")
    weights = -1.2 * np.log(np.arange(1, routers.n_experts + 1))
    ids = []
    for _ in layers:
        scores = rng.permuted(weights) + rng.gumbel(size=(TRACED, routers.n_experts))
        ids.append(np.argsort(-scores, axis=1)[:, :n_used])
    stage = StageRouting.judge(np.array(ids, dtype=np.uint16), routers.n_experts)
    return RoutingTrace("", name, "made up", routers, layers, 512, dict.fromkeys(STAGES, stage))


class Stopwatch:
    """Adds up the seconds of calls to a function."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call, self.seconds, self.calls = call, 0.0, 0

    def __call__(self, *arguments: Any) -> Any:
        start = time.perf_counter()
        try:
            return self._call(*arguments)
        finally:
            self.seconds += time.perf_counter() - start
            self.calls += 1


def main() -> None:
    parser = arguments(__doc__, "planner-speed")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--datasheet", default="rtx4090-xeon4314")
    options = parser.parse_args()
    record(measured(options), options.out, each={"machine": describe()})


def measured(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    sheet, dry_run = Datasheet.load(options.datasheet), skeleton.dry_run
    for shape, file_type, budget, n_ctx in MODELS:
        with tempfile.TemporaryDirectory() as folder:
            path = make_sparse_model(Path(folder) / f"{shape}.gguf", shape=shape, file_type=file_type)
            settings = Settings(n_ctx=n_ctx, n_threads=sheet.cpu.cores)
            start = time.perf_counter()
            graph = autoplan.read_graph(path, settings)
            read_s = time.perf_counter() - start
            profile = make_profile(graph, sheet)
            routers = routers_of(path)
            for planner, traced in product(PLANNERS, (False, True) if routers else (False,)):
                os.environ["XDG_CACHE_HOME"] = str(Path(folder) / f"traced-{traced}")
                if routers and traced:
                    keep_trace(made_up(path.name, routers, graph), path)
                runs = []
                for _ in range(options.repeats):
                    watch = skeleton.dry_run = Stopwatch(dry_run)  # type: ignore[assignment]
                    known.clear()  # dry runs that this process remembers
                    start = time.perf_counter()
                    choices = Choices(planner=planner, profile=profile, elsewhere=True)  # type: ignore[arg-type]
                    plan = autoplan.plan_graph(path, graph, budget, settings, choices)
                    runs.append((time.perf_counter() - start, watch.seconds, watch.calls))
                yield {
                    "shape": shape, "file_type": file_type, "budget": budget, "n_ctx": n_ctx, "planner": planner,
                    "traced": traced,
                    "datasheet": options.datasheet, "targets": len(graph.targets(1)), "layers": graph.n_layer,
                    "read_graph_s": read_s, "seconds": [run[0] for run in runs],
                    "median_s": statistics.median(run[0] for run in runs),
                    "dry_runs_s": statistics.median(run[1] for run in runs), "dry_runs": runs[0][2],
                    "chosen": plan.planner, "request_s": plan.predicted.request_s,
                }  # fmt: skip
    skeleton.dry_run = dry_run


if __name__ == "__main__":
    main()
