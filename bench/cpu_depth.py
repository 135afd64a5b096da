"""Whole models at depth on the CPU alone: our plan against unpatched llama.cpp with both -fa, and ik_llama.cpp.

python bench/cpu_depth.py [--out FILE.jsonl] [--models llama3-8b:Q4_0,qwq-32b:Q4_K_M] [--layers 2]
    [--depths 0,4096,12288] [--prompt 512] [--generate 32] [--cache f16] [--threads N] [--rounds 5]
    [--ik PATH/llama-bench]

Models have the shape's layers, some of them, and 32000 words. The plan is `auto`'s, made for the request at each depth
from a profile of this machine. Every engine is loaded anew in each round. llama.cpp and oallama run in bench's workers,
which share filled caches by form of attention. ik_llama.cpp runs by its llama-bench (-gp), with -fa 1 and 0 and with
-rtr 1; it has no times of a prompt behind a depth. With a quantised --cache nobody runs without -fa. One JSON line per
model and depth: medians of the rounds in seconds of TTFT and TPOT, and how many times faster ours is than the fastest
of each rival, with the interval.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from oallama.bench import LoadParams, Sweep, find_baseline_lib, run_bench
from oallama.bench.baselines import cpu_forms
from oallama.bench.machine import describe
from oallama.bench.planned import planned
from oallama.bench.script import arguments, note, numbers, record, words
from oallama.bench.some_layers import made
from oallama.bench.stats import speedup
from oallama.data.plan import HOST
from oallama.engine import runtime
from oallama.engine.load_settings import KV_TYPES, Settings
from oallama.loading import autoplan
from oallama.loading.autoplan import Choices
from oallama.planning import Workload
from oallama.profiling.workload import UNFUSED_V_TYPES

OURS = "oallama"
IK = {"ik -fa 1": ["-fa", "1"], "ik -fa 0": ["-fa", "0"], "ik -fa 1 -rtr 1": ["-fa", "1", "-rtr", "1"]}


def main() -> None:
    parser = arguments(__doc__, "cpu-depth")
    parser.add_argument("--models", type=words, default=["llama3-8b:Q4_0", "qwq-32b:Q4_K_M"], help="SHAPE:TYPE")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--depths", type=numbers, default=[0, 4096, 12288])
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--generate", type=int, default=32)
    parser.add_argument("--cache", default="f16", choices=sorted(KV_TYPES), help="type of K and V")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ik", type=Path, help="llama-bench of ik_llama.cpp, built for this machine")
    options = parser.parse_args()
    record(measured(options), options.out, each={"machine": describe()})


def measured(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for name, model in made(options.models, options.layers):
        for depth in options.depths:
            yield {"model": name, "layers": options.layers, **cell(model, depth, options)}


def cell(model: Path, depth: int, options: argparse.Namespace) -> dict[str, Any]:
    n_ctx = -(-(depth + options.prompt + options.generate + 1) // 256) * 256
    settings = Settings(n_ctx=n_ctx, n_threads=options.threads, type_k=options.cache, type_v=options.cache)
    graph = autoplan.read_graph(model, settings)
    work = Workload(options.prompt, options.generate, depth)
    plan = autoplan.plan_graph(model, graph, None, settings, Choices(device=HOST, workload=work))
    base = LoadParams(
        n_ctx=n_ctx, n_threads=options.threads, load_mode="none", type_k=options.cache, type_v=options.cache
    )
    engines = [replace(planned(plan, runtime.lib_dir(), base), name=OURS), *cpu_forms(base, find_baseline_lib())]
    flags_of_ik = {name: flags for name, flags in IK.items() if options.cache in UNFUSED_V_TYPES or "-fa 1" in name}
    lengths = (options.prompt,), (depth,), (options.generate,)
    sweep = Sweep(*lengths, repeats=1, interleave="reload", state_dir=model.parent)
    ttft: dict[str, list[float]] = {}
    tpot: dict[str, list[float]] = {}
    for round_ in range(options.rounds):
        note(f"{model.stem} behind {depth}: round {round_ + 1}")
        shift = round_ % len(engines)
        for result in run_bench(model, engines[shift:] + engines[:shift], sweep):
            ttft.setdefault(result.engine, []).extend(result.values("ttft_s"))
            tpot.setdefault(result.engine, []).extend(float(each) for each in result.values("tpot_s"))
        for name, flags in flags_of_ik.items() if options.ik else ():
            prompt_s, token_s = of_ik(options.ik, model, depth, flags, options)
            tpot.setdefault(name, []).append(token_s)
            if depth == 0:
                ttft.setdefault(name, []).append(prompt_s)
    parts, context = plan.predicted.parts, plan.context
    return {
        "depth": depth,
        "n_prompt": options.prompt,
        "n_generate": options.generate,
        "threads": options.threads,
        "cache": options.cache,
        "plan": {"flash_attn": context.flash_attn, "attention": context.attention, "n_ubatch": context.n_ubatch},
        "predicted": {
            "ttft_s": sum(parts["prefill"].values()),
            "tpot_s": sum(parts["decode"].values()) / (options.generate - 1),
        },
        "ttft_s": {name: round(median(each), 4) for name, each in ttft.items()},
        "tpot_s": {name: round(median(each), 6) for name, each in tpot.items()},
        "times": {"ttft": against(ttft), "tpot": against(tpot)},
    }


def against(seconds: dict[str, list[float]]) -> dict[str, Any]:
    """How many times faster ours is than each rival at its fastest, by the rival's name without flags."""
    found = {}
    for rival in ("llama.cpp", "ik"):
        flags = [name for name in seconds if name.startswith(rival)]
        if flags:
            fastest = min(flags, key=lambda name: median(seconds[name]))
            gained = speedup(seconds[fastest], seconds[OURS])
            assert gained
            found[rival] = {"fastest": fastest, **gained.to_json()}
    return found


def of_ik(program: Path, model: Path, depth: int, flags: list[str], options: argparse.Namespace) -> tuple[float, float]:
    """Seconds of a prompt without a depth, and of a token behind the depth and the prompt."""
    command = [str(program), "-m", str(model), "-t", str(options.threads), "-mmp", "0", "-r", "1", "-o", "json", *flags]
    command += ["-ctk", options.cache, "-ctv", options.cache]
    command += ["-p", str(options.prompt) if depth == 0 else "0", "-n", "0"]
    command += ["-gp", f"{depth + options.prompt},{options.generate}"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    tests = json.loads(done.stdout)
    prompts = [test["samples_ns"][0] / 1e9 for test in tests if test["n_gen"] == 0]
    token_s = tests[-1]["samples_ns"][0] / 1e9 / options.generate
    return (prompts[0] if prompts else float("nan")), token_s


if __name__ == "__main__":
    main()
