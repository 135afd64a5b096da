"""Several sequences at once on the CPU alone: predicted and measured TPOT, by a plan for as many, and by one for one.

python bench/parallel_sequences.py [--out FILE.jsonl] [--models llama3-8b:Q4_0] [--layers 2] [--sequences 1,2,4,8,16]
    [--context 1024] [--generate 32] [--threads N] [--rounds 5]

Models have the shape's layers, some of them, and 32000 words. Each sequence has `--context` tokens of its own, and
starts in the middle of them. "for N" is `auto`'s plan for N sequences, "for one" is what it would plan for one in the
same context; llama.cpp is unpatched, with -fa 1 and 0. All generate with N sequences, and take turns. One JSON line per
model and N: medians in seconds per step, and how many times faster "for N" is than the others, with the interval.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from oallama.bench import LoadParams, Sweep, cpu_only, find_baseline_lib, run_bench
from oallama.bench.machine import describe
from oallama.bench.planned import planned
from oallama.bench.script import arguments, note, numbers, record, words
from oallama.bench.some_layers import made
from oallama.bench.stats import speedup
from oallama.data.plan import HOST, PlacementPlan
from oallama.data.predicted import predicted_times
from oallama.engine import runtime
from oallama.engine.load_settings import Settings
from oallama.loading import autoplan
from oallama.loading.autoplan import Choices
from oallama.planning import Workload

OURS = "for N"
N_PROMPT = 128


def main() -> None:
    parser = arguments(__doc__, "parallel-sequences")
    parser.add_argument("--models", type=words, default=["llama3-8b:Q4_0"], help="SHAPE:TYPE")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--sequences", type=numbers, default=[1, 2, 4, 8, 16])
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--generate", type=int, default=32)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    record(measured(options), options.out, each={"machine": describe()})


def measured(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for name, model in made(options.models, options.layers):
        for n in options.sequences:
            yield {"model": name, "layers": options.layers, **cell(model, n, options)}


def cell(model: Path, n: int, options: argparse.Namespace) -> dict[str, Any]:
    note(f"{model.stem}: {n} sequences")
    settings = Settings(n_ctx=n * options.context, n_seq_max=n, n_threads=options.threads)
    graph = autoplan.read_graph(model, settings)
    depth = options.context // 2 - N_PROMPT
    plans = {
        name: autoplan.plan_graph(
            model,
            graph,
            None,
            settings,
            Choices(device=HOST, workload=Workload(N_PROMPT, options.generate, depth, parallel)),
        )
        for name, parallel in ((OURS, n), ("for one", 1))
    }
    base = LoadParams(n_ctx=settings.n_ctx, n_seq_max=n, n_threads=options.threads, load_mode="none")
    engines = [planned(plan, runtime.lib_dir(), base, name=name) for name, plan in plans.items()]
    engines += [
        replace(cpu_only(replace(base, flash_attn=form), find_baseline_lib()), name=f"llama.cpp -fa {form}")
        for form in ("on", "off")
    ]
    sweep = Sweep((N_PROMPT,), (depth,), (options.generate,), repeats=options.rounds)
    tpot = {result.engine: [float(s) for s in result.values("tpot_s")] for result in run_bench(model, engines, sweep)}
    gains = {name: speedup(each, tpot[OURS]) for name, each in tpot.items() if name != OURS}
    predicted = {name: predicted_times(plan, N_PROMPT, options.generate, depth)[1] for name, plan in plans.items()}
    return {
        "sequences": n,
        "context_each": options.context,
        "depth": depth + N_PROMPT,
        "n_generate": options.generate,
        "threads": options.threads,
        "plans": {name: chosen(plan) for name, plan in plans.items()},
        "predicted_tpot_s": predicted,
        "tpot_s": {name: round(median(each), 6) for name, each in tpot.items()},
        "times": {name: gain.to_json() for name, gain in gains.items() if gain},
    }


def chosen(plan: PlacementPlan) -> dict[str, Any]:
    """The form of attention, and how many weights lie in which way."""
    realised = [tensor.realisation for tensor in plan.tensors.values() if tensor.realisation]
    ways = {name: realised.count(name) for name in sorted(set(realised))}
    return {"flash_attn": plan.context.flash_attn, "attention": plan.context.attention, "realisations": ways}


if __name__ == "__main__":
    main()
