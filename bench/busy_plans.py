"""Do plans that are chosen beside other work hold there?

python bench/busy_plans.py [--out FILE.jsonl] [--runs 20] [--loads quiet,half,..] [--model FILE] [--vram 50%]

Each run, beside one load: a plan is chosen as `oallama run --vram` does at the first use of a model, with a profile
from the quiet machine (in odd runs with one that was taken beside the load "one"). Then the plan that was kept, the CPU
alone with our kernels and llama.cpp's own placements (layer split, --fit, the CPU alone) are measured in interleaved
rounds beside the load, until the intervals of their ratios are below 5 %, or for 20 s. A plan that two of them stand
for is measured once. Seconds are medians of the rounds, or means where rounds differ by more than a quarter
(`bench/stats.py`: beside bursts).

One JSON line per run: planner, seconds of each, rounds, the ratio of the best rival to the plan kept (1 and more: the
plan kept is as fast), the same of the best of llama.cpp's placements, whether the measured request lies within the
range that the plan states (measured at its first use, or else predicted), the rounds of that use, and seconds of
choosing. A last line per load counts.

Loads: half (half of a core in turns of 10 ms), one (a core), memory (a core that copies memory); each steady, or as
half-bursty and so on, for 1 s in every 2. quiet: none. The accelerator is a loopback RPC server with all threads, and
the host has half of them, as in `oallama demo`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from oallama.bench import Engine, LoadParams, Result, Sweep, planned, run_bench
from oallama.bench.machine import describe
from oallama.bench.script import arguments, note, record, words
from oallama.bench.stats import average_for
from oallama.bench.verdict import is_narrow
from oallama.data.plan import HOST, PlacementPlan
from oallama.data.profile import Profile
from oallama.engine import runtime
from oallama.engine.load_settings import Settings
from oallama.engine.rpc import LocalRpcServer, share_processor
from oallama.loading import autoplan, start
from oallama.loading.autoplan import Choices
from oallama.loading.trial import Trial
from oallama.modelmaker import make_model
from oallama.planning import Workload

SHAPE = {"n_layer": 16, "n_embd": 1024, "n_ff": 2816, "n_head": 16, "n_head_kv": 4}
REQUEST = Workload(n_prompt=64, n_generate=16)
RIVALS = ("layers", "fit", "cpu", "stock-cpu")
OURS = "cpu"  # where llama.cpp's kernels are not the fastest, so that there is a "stock-cpu" beside it
MEASURED_S = 20.0
KEPT_AT_LEAST = 0.95

_LOAD = """
import os, time, numpy
kind, bursty = {kind!r}, {bursty!r}
source = numpy.ones(1 << 25)
copy = source.copy()
def work(seconds):
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        if kind == "memory":
            numpy.copyto(copy, source)
def turn(seconds):
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        work(0.01)
        if kind == "half":
            time.sleep(0.01)
while os.path.exists("/proc/{parent}"):
    turn(1.0)
    if bursty:
        time.sleep(1.0)
"""
LOADS = ("half", "one", "memory", "half-bursty", "one-bursty", "memory-bursty")


def main() -> None:
    parser = arguments(__doc__, "busy-plans")
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--loads", type=words, default=list(LOADS))
    parser.add_argument("--model", type=Path)
    parser.add_argument("--vram", default="50%")
    options = parser.parse_args()
    share_processor()
    with tempfile.TemporaryDirectory() as folder, LocalRpcServer() as server:
        path = options.model or Path(folder) / "247m.gguf"
        if options.model is None:
            make_model(path, arch="llama", shape="small", file_type="Q8_0", overrides=SHAPE)
        study = Study(path, options.vram, server.devices[0], Path(folder))
        record(study.lines(options.loads, options.runs), options.out, each={"machine": describe()})


class Study:
    """The runs on one model and budget."""

    def __init__(self, model: Path, vram: str, device: str, folder: Path) -> None:
        self.model, self.vram, self.device, self.folder = model, vram, device, folder
        half = max(1, len(os.sched_getaffinity(0)) // 2)
        self.settings = Settings(n_ctx=1024, n_threads=half)
        self.graph = autoplan.read_graph(model, self.settings)
        self.settings = autoplan.resolve(self.settings, self.graph.n_ctx_train)
        self.profiles: dict[str, Path] = {}

    def lines(self, loads: Sequence[str], runs: int) -> Iterator[dict[str, Any]]:
        self.profile("quiet")
        for load in loads:
            found = []
            for run in range(runs):
                note(f"{load}: run {run + 1} of {runs}")
                found.append({"load": load, "run": run, **self.run(load, run)})
                yield found[-1]
            yield {
                "load": load,
                "runs": runs,
                "kept_holds": sum(line["kept_against_best"] >= KEPT_AT_LEAST for line in found),
                "in_range": sum(line["in_range"] for line in found),
                "worst": min(line["kept_against_best"] for line in found),
                "median": median(line["kept_against_best"] for line in found),
                "worst_against_stock": min(line["kept_against_stock"] for line in found),
                "width": round(median(line["range_s"][1] / line["range_s"][0] for line in found), 3),
            }

    def profile(self, load: str) -> Profile:
        """The profile taken beside a load, once."""
        if load not in self.profiles:
            self.profiles[load] = self.folder / f"profile-{load}.json"
            os.environ["XDG_CACHE_HOME"] = str(self.folder / f"cache-{load}")
            with running(load):
                autoplan.profile_for(self.graph, Choices(device=self.device), self.settings).save(self.profiles[load])
        return Profile.load(self.profiles[load])

    def run(self, load: str, run: int) -> dict[str, Any]:
        source = "one" if run % 2 else "quiet"
        choices = Choices(device=self.device, profile=self.profile(source), workload=REQUEST)
        os.environ["XDG_CACHE_HOME"] = str(self.folder / f"plans-{load}-{run}")  # nothing is kept from other runs
        said: list[str] = []
        with running(load), ExitStack() as stack:
            begin = time.perf_counter()
            considered = autoplan.consider(self.model, self.graph, self.vram, self.settings, choices)
            kept = start.plan_model(self.model, self.vram, self.settings, choices, trial=Trial(say=said.append))
            seconds = time.perf_counter() - begin
            plans = considered.found.plans
            rivals = {name: plans[name] for name in RIVALS if name in plans}
            measured, rounds, steady = self.measure({"kept": kept, **rivals}, stack)
        best = min(rivals, key=lambda name: measured[name])
        stock = min(measured[name] for name in rivals if name != OURS or "stock-cpu" not in rivals)
        promised = (kept.measured or {}).get("range_s") or kept.predicted.range_s or (0.0, 0.0)
        least, most = promised
        return {
            "profile": source,
            "planner": kept.planner["name"],
            "predicted_best": considered.found.best.planner["name"],
            "seconds": {name: round(value, 4) for name, value in measured.items()},
            "rounds": rounds,
            "steady": steady,
            "best_rival": best,
            "kept_against_best": round(measured[best] / measured["kept"], 4),
            "kept_against_stock": round(stock / measured["kept"], 4),
            "range_s": [round(least, 4), round(most, 4)],
            "in_range": least <= measured["kept"] <= most,
            "rounds_s": (kept.measured or {}).get("rounds_s", []),
            "choosing_s": round(seconds, 2),
            "said": said,
        }

    def measure(self, plans: dict[str, PlacementPlan], stack: ExitStack) -> tuple[dict[str, float], int, bool]:
        """Request seconds of each plan in interleaved rounds, all loaded; rounds, and whether they are alike."""
        sweep = Sweep(
            prompts=(REQUEST.n_prompt,),
            gens=(REQUEST.n_generate,),
            repeats=1000,
            limit_s=MEASURED_S,
            enough=is_narrow,
        )
        different = {(plan.to_backend_map(), str(plan.context)): name for name, plan in plans.items()}
        engines = [self.engine(name, plans[name], stack) for name in different.values()]
        results: list[Result] = run_bench(self.model, engines, sweep)
        times = {result.engine: result.values("e2e_s") for result in results}
        average = average_for([*times.values()])
        stand_for = {name: different[plan.to_backend_map(), str(plan.context)] for name, plan in plans.items()}
        seconds = {name: float(average(times[stands])) for name, stands in stand_for.items()}
        return seconds, min(map(len, times.values())), average is np.median

    def engine(self, name: str, plan: PlacementPlan, stack: ExitStack) -> Engine:
        uses = any(device != HOST for device in plan.devices)
        servers = (stack.enter_context(LocalRpcServer(register=False)).endpoint,) if uses else ()
        params = LoadParams(n_threads=self.settings.n_threads, rpc_servers=servers)
        return replace(planned(plan, runtime.lib_dir(), params), name=name)


@contextmanager
def running(load: str) -> Iterator[None]:
    """A process that makes the load, for the time of the block."""
    if load == "quiet":
        yield
        return
    kind, _, bursty = load.partition("-")
    program = _LOAD.format(kind=kind, bursty=bool(bursty), parent=os.getpid())
    # The shell ends at once: what this process has started itself would count as its own work.
    shell = ["sh", "-c", '"$0" -c "$1" >/dev/null 2>&1 & echo $!', sys.executable, program]
    pid = int(subprocess.run(shell, capture_output=True, text=True, check=True).stdout)
    try:
        time.sleep(0.7)
        yield
    finally:
        os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
