"""Threads that wait where other programs need the CPUs: ours, against those of unpatched llama.cpp (OpenMP's).

python bench/busy_threads.py [--out FILE.jsonl] [--rounds 5] [--loads none,half,one,bursty,memory,all,twice]
                             [--tokens 16]

A model of 126M parameters in Q8_0 on all CPUs, without a plan. Loads are those of bench/busy.py; all and twice are one
and two busy loops for every CPU. Rounds are interleaved, both engines are loaded once per load. One JSON line per load
and for prompts of 128 tokens and the generation of `--tokens`: ms of each round, and how many times faster ours are,
with an interval, than llama.cpp with as many threads and with one less.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from busy import LOADS, running

from oallama.bench import Engine, LoadParams, Sweep, find_baseline_lib, run_bench
from oallama.bench.machine import describe
from oallama.bench.script import arguments, note, record, words
from oallama.bench.stats import speedup
from oallama.engine import runtime
from oallama.modelmaker import make_model

N_CPUS = len(os.sched_getaffinity(0))
BESIDE = {"none": [], **{load: [load] for load in LOADS}, "all": ["one"] * N_CPUS, "twice": ["one"] * 2 * N_CPUS}
OURS, THEIRS, ONE_LESS = "oallama, no plan", "llama.cpp unpatched", "llama.cpp unpatched, a thread less"


def main() -> None:
    parser = arguments(__doc__, "busy-threads")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--loads", type=words, default=list(BESIDE))
    parser.add_argument("--tokens", type=int, default=16, help="generated at a time")
    options = parser.parse_args()
    runtime.quiet()
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder) / "small.gguf", shape="small", file_type="Q8_0")
        record(
            measured(model, options.rounds, options.loads, options.tokens), options.out, each={"machine": describe()}
        )


def measured(model: Path, rounds: int, loads: list[str], n_tokens: int) -> Iterator[dict[str, Any]]:
    cpu = LoadParams(n_ctx=512, devices=(), n_threads=N_CPUS)
    engines = [
        Engine(THEIRS, find_baseline_lib(), cpu, placement="CPU", baseline=True),
        Engine(ONE_LESS, find_baseline_lib(), replace(cpu, n_threads=N_CPUS - 1), placement="CPU", baseline=True),
        Engine(OURS, runtime.lib_dir(), cpu, placement="CPU"),
    ]
    for load in loads:
        note(f"{load}: {rounds} rounds")
        with ExitStack() as stack:
            for one in BESIDE[load]:
                stack.enter_context(running(one))
            sweep = Sweep((128,), (0,), (n_tokens + 1,), rounds)
            results = {result.engine: result for result in run_bench(model, engines, sweep)}
        for what in ("ttft", "tpot"):
            seconds = {name: result.values(f"{what}_s") for name, result in results.items()}
            gained = {name: speedup(seconds[name], seconds[OURS]) for name in (THEIRS, ONE_LESS)}
            ms = {name: [round(1e3 * s, 3) for s in each] for name, each in seconds.items()}
            faster = {name: ratio.to_json() for name, ratio in gained.items() if ratio}
            run = {"load": load, "n_threads": N_CPUS, "n_tokens": n_tokens, "what": what}
            yield {**run, "ms": ms, "ours_faster": faster}


if __name__ == "__main__":
    main()
