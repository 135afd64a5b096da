"""Threads that wait, where other programs need the CPUs: ours, OpenMP's in this build, and unpatched llama.cpp.

python bench/busy_threads.py [--out FILE.jsonl] [--rounds 5] [--loads none,half,one,bursty,memory,all,twice]

A model of 126M parameters in Q8_0 on all CPUs, without a plan, by llama-bench. Loads are those of bench/busy.py; all
and twice are one and two busy loops for every CPU. Rounds are interleaved. One JSON line per load: ms of a prompt of
128 tokens and per token of 16, of each round, and how many times faster ours are, with an interval.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from busy import LOADS, running

from oallama.base.environment import THREADS
from oallama.bench import find_baseline_lib
from oallama.bench.machine import describe
from oallama.bench.script import arguments, note, record, words
from oallama.bench.stats import speedup
from oallama.engine import runtime
from oallama.modelmaker import make_model

N_CPUS = len(os.sched_getaffinity(0))
BESIDE = {"none": [], **{load: [load] for load in LOADS}, "all": ["one"] * N_CPUS, "twice": ["one"] * 2 * N_CPUS}
N_PROMPT, N_GENERATE = 128, 16


def main() -> None:
    parser = arguments(__doc__, "busy-threads")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--loads", type=words, default=list(BESIDE))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder) / "small.gguf", shape="small", file_type="Q8_0")
        record(measured(model, options.rounds, options.loads), options.out, each={"machine": describe()})


def measured(model: Path, rounds: int, loads: list[str]) -> Iterator[dict[str, Any]]:
    ours = runtime.program("llama-bench")
    engines = {
        "ours": (ours, {}),
        "openmp": (ours, {THREADS.name: "openmp"}),
        "llama.cpp": (find_baseline_lib() / "llama-bench", {}),
    }
    for load in loads:
        prompt: dict[str, list[float]] = {name: [] for name in engines}
        token: dict[str, list[float]] = {name: [] for name in engines}
        for i in range(rounds):
            note(f"{load}, round {i + 1} of {rounds}")
            with ExitStack() as stack:
                for one in BESIDE[load]:
                    stack.enter_context(running(one))
                for name, (program, variables) in engines.items():
                    of_prompt, of_token = timed(program, variables, model)
                    prompt[name].append(of_prompt)
                    token[name].append(of_token)
        yield {
            "load": load,
            "n_threads": N_CPUS,
            "ttft_ms": prompt,
            "tpot_ms": token,
            "ttft_faster": {name: ratio(prompt[name], prompt["ours"]) for name in engines if name != "ours"},
            "tpot_faster": {name: ratio(token[name], token["ours"]) for name in engines if name != "ours"},
        }


def timed(program: Path, variables: dict[str, str], model: Path) -> tuple[float, float]:
    """ms of the prompt, and per token."""
    command = [program, "-m", model, "-p", N_PROMPT, "-n", N_GENERATE, "-r", 1, "-t", N_CPUS, "-ngl", 0, "-o", "json"]
    done = subprocess.run([*map(str, command)], env=os.environ | variables, capture_output=True, text=True, check=True)
    prompt, token = sorted(json.loads(done.stdout), key=lambda test: int(test["n_gen"]))
    return round(prompt["avg_ns"] / 1e6, 2), round(token["avg_ns"] / 1e6 / N_GENERATE, 3)


def ratio(theirs: list[float], ours: list[float]) -> list[float]:
    """How many times faster ours are, and the interval."""
    found = speedup(theirs, ours)
    assert found is not None
    return [round(value, 3) for value in (found.value, found.low, found.high)]


if __name__ == "__main__":
    main()
