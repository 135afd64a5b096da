"""How fast do runs make a wrong profile good?

python bench/learning.py [--out FILE.jsonl] [--profiles 10] [--runs 6] [--shared]

The machine's own profile is scaled on purpose, every device by a factor of its own from 0.6 to 1.6. Then a model of
247M parameters is planned, loaded and run several times, each time with a plan made anew from that profile and from
what the runs before have taught. One JSON line per scaled profile: the factors, and by run the planner and the error
of the predicted seconds per token and of the prompt, as predicted / measured - 1. A last line has the share of
profiles whose error is below 10 % after each run, and the medians.

The accelerator is a loopback RPC server. It has half of the threads, and so has the host: the device has a processor of
its own, as real ones do. With --shared the server has all threads: two programs take turns on the same CPUs, and the
same plan's seconds differ by 10 to 30 % from run to run. Plans are not measured at first use. Runs beside other work
teach nothing, so the machine must be quiet: `busy` counts runs that were not taken alone.
"""

from __future__ import annotations

import os
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from oallama.bench.machine import describe
from oallama.bench.script import arguments, note, record
from oallama.data.profile import Profile
from oallama.engine.load_settings import Settings
from oallama.engine.rpc import LocalRpcServer, share_processor
from oallama.loading import autoplan
from oallama.loading.autoplan import Choices
from oallama.loading.learning import history_of
from oallama.modelmaker import make_model

SHAPE = {"n_layer": 16, "n_embd": 1024, "n_ff": 2816, "n_head": 16, "n_head_kv": 4}
BELOW = 0.10
N_PROMPT, N_GENERATE = 128, 32


def main() -> None:
    parser = arguments(__doc__, "learning")
    parser.add_argument("--profiles", type=int, default=10)
    parser.add_argument("--runs", type=int, default=6)
    parser.add_argument("--shared", action="store_true")
    options = parser.parse_args()
    share_processor()
    n_threads = max(1, len(os.sched_getaffinity(0)) // 2)
    with tempfile.TemporaryDirectory() as folder, LocalRpcServer(None if options.shared else n_threads) as server:
        path = Path(folder) / "247m.gguf"
        make_model(path, arch="llama", shape="small", file_type="Q8_0", overrides=SHAPE)
        lines = measured(path, server.devices[0], Path(folder), options.profiles, options.runs, n_threads)
        record(lines, options.out, each={"machine": describe(), "shared": options.shared})


def measured(
    model: Path, device: str, folder: Path, profiles: int, runs: int, n_threads: int
) -> Iterator[dict[str, Any]]:
    settings = Settings(n_ctx=1024, n_threads=n_threads)
    graph = autoplan.read_graph(model, settings)
    settings = autoplan.resolve(settings, graph.n_ctx_train)
    profile = autoplan.profile_for(graph, Choices(device=device), settings)
    rng, found = random.Random(7), []
    for number in range(profiles):
        os.environ["XDG_CACHE_HOME"] = str(folder / f"cache-{number}")
        factors = {name: round(rng.uniform(0.6, 1.6), 3) for name in (device, "CPU")}
        note(f"profile {number + 1} of {profiles}: {factors}")
        steps = [step(model, profile.scaled(factors), settings) for _ in range(runs)]
        busy = sum(not run.clean for run in history_of(settings.n_threads).runs)
        found.append({"factors": factors, "busy": busy, **{k: [s[k] for s in steps] for k in steps[0]}})
        yield found[-1]
    yield {
        "profiles": profiles,
        "below_10_percent": [sum(abs(f["tpot_error"][i]) < BELOW for f in found) / profiles for i in range(runs)],
        "median_tpot_error": [round(median(abs(f["tpot_error"][i]) for f in found), 4) for i in range(runs)],
        "median_prompt_error": [round(median(abs(f["prompt_error"][i]) for f in found), 4) for i in range(runs)],
    }


def step(model: Path, profile: Profile, settings: Settings) -> dict[str, Any]:
    """One plan and one run."""
    from oallama import Llama

    os.environ["OALLAMA_PLAN_CACHE"] = "0"
    llm = Llama(
        str(model), vram="50%", profile=profile, verify=False, n_ctx=settings.n_ctx, n_batch=1024,
        n_threads=settings.n_threads, n_threads_batch=settings.n_threads, verbose=False,
    )  # fmt: skip
    tokens = llm.tokenize(b"one two three " * N_PROMPT)[:N_PROMPT]
    list(zip(range(N_GENERATE), llm.generate(tokens, temp=0.0), strict=False))
    times = llm.placement().times
    assert times and llm.plan
    llm.close()
    errors = [(times.predicted_tpot_s, times.tpot_s), (times.predicted_prefill_s, times.prefill_s)]
    tpot, prompt = (round(predicted / took - 1, 4) if predicted and took else None for predicted, took in errors)
    return {"planner": llm.plan.planner["name"], "tpot_error": tpot, "prompt_error": prompt}


if __name__ == "__main__":
    main()
