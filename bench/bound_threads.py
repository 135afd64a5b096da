"""A loopback RPC server whose threads are bound to one CPU each, against one whose threads are not.

python bench/bound_threads.py [--out FILE.jsonl] [--rounds 5]

12 layers of qwen3moe in Q8_0; the host has one thread, the server all. The plan has the last layer's experts and the
output head on the server. Rounds are interleaved, every engine is loaded anew in each. Two JSON lines, TTFT of 128
tokens and TPOT behind 2048: ms of each round, and how many times faster the bound threads are, with an interval.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from cells import MODELS, written

from oallama.base.environment import BIND_THREADS
from oallama.bench import Engine, LoadParams, Sweep, planned, run_bench
from oallama.bench.machine import describe
from oallama.bench.script import arguments, record
from oallama.bench.stats import speedup
from oallama.data.plan import HOST, PlacementPlan
from oallama.engine import runtime
from oallama.engine.load_settings import Settings
from oallama.engine.rpc import LocalRpcServer, share_processor
from oallama.loading import autoplan
from oallama.loading.autoplan import Choices

ARCH, DEPTH = "qwen3moe", 2048
LAST = MODELS[ARCH]["n_layer"] - 1
MOVED = ("output", f"blk.{LAST}.ffn")  # tensors whose names begin so


def main() -> None:
    parser = arguments(__doc__, "bound-threads")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    share_processor()
    runtime.quiet()
    record(measured(options.rounds), options.out, each={"machine": describe()})


def measured(rounds: int) -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        model = written(ARCH, Path(folder))
        plan = with_last_layer(plan_of(model), LocalRpcServer().devices[0])
        engines: list[Engine] = []
        for name in ("bound", "unbound"):
            if name == "unbound":
                os.environ[BIND_THREADS.name] = "0"  # the server takes it
            server = stack.enter_context(LocalRpcServer(register=False))
            os.environ.pop(BIND_THREADS.name, None)
            base = LoadParams(n_threads=1, rpc_servers=(server.endpoint,))
            engines.append(replace(planned(plan, runtime.lib_dir(), base), name=name))
        sweep = Sweep((128,), (DEPTH,), (33,), repeats=rounds, interleave="reload", state_dir=folder)
        found = {result.engine: result for result in run_bench(model, engines, sweep)}
        for what in ("ttft", "tpot"):
            times = {name: result.values(f"{what}_s") for name, result in found.items()}
            gained = speedup(times["unbound"], times["bound"])
            assert gained
            ms = {name: [1e3 * s for s in each] for name, each in times.items()}
            yield {"what": what, "depth": DEPTH, "ms": ms, "bound_times_unbound": gained.to_json()}


def plan_of(model: Path) -> PlacementPlan:
    """The CPU alone."""
    settings = Settings(n_ctx=DEPTH + 256, n_threads=1)
    choices = Choices(device=HOST, planner="cpu")
    return autoplan.consider(model, autoplan.read_graph(model, settings), None, settings, choices).found.best


def with_last_layer(plan: PlacementPlan, device: str) -> PlacementPlan:
    """The same with the MOVED and the output on the device."""
    tensors = {
        name: replace(
            placed, segments=tuple(replace(s, device=device, mode="resident", realisation="") for s in placed.segments)
        )
        if name.startswith(MOVED)
        else placed
        for name, placed in plan.tensors.items()
    }
    return replace(plan, devices=(device, HOST), layers=(*plan.layers[:-1], device), tensors=tensors)


if __name__ == "__main__":
    main()
