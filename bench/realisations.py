"""Measures realisations of weights on the CPU: plain against repacked, per operator and end to end.

python bench/realisations.py operators|plans [--out FILE.jsonl]

operators: one matrix multiplication per weight type and token count, both realisations in turn, and which one
`choose` takes for that many tokens: half of the rounds decide, the other half is reported. plans: a plan with chosen
realisations against the same homes in llama.cpp's own ones on this device, and against all of them plain, which is
what llama.cpp does beside an accelerator with host memory of its own (CUDA, Vulkan); interleaved: TTFT and TPOT. Ratios
above 1: what was chosen is faster. Losing cells are kept.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from oallama.bench.engines import LoadParams
from oallama.bench.machine import describe
from oallama.bench.planned import planned
from oallama.bench.results import Result
from oallama.bench.script import arguments, record, words
from oallama.bench.sweep import Sweep, order, run_bench
from oallama.data.entries import DeviceInfo, OperatorTime
from oallama.data.plan import HOST, PlacementPlan
from oallama.data.profile import Profile
from oallama.engine import device_list, native, runtime
from oallama.engine.load_settings import Settings
from oallama.engine.rpc import LocalRpcServer
from oallama.loading import autoplan, start
from oallama.modelmaker import make_model
from oallama.planning import Workload
from oallama.planning.realisation import Weight, choose, usual_realisation
from oallama.profiling.fingerprint import cpu_set
from oallama.profiling.profiler import cold_bytes

TYPES = ("q4_0", "q4_K", "q5_K", "q6_K", "q8_0", "iq4_nl", "f16")
TOKENS = (1, 4, 32, 512)
BOTH = ("plain", "repacked")
WAYS = ("default", "plain", "chosen")


# ---- operators -----------------------------------------------------------------------------------------------------


def operators(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    core, threads = native.core(), args.threads
    bench = core.OpBench(HOST, threads, True, cold_bytes(device_list.device(HOST)))
    k, m = args.shape
    for kind in args.weights:
        ways = BOTH if core.repacks(HOST, kind, k, m, 0) else BOTH[:1]
        for n in TOKENS:
            samples: dict[str, list[float]] = {way: [] for way in ways}
            for round_ in range(args.rounds):
                for i in order(len(ways), round_):
                    t = bench.mul_mat(
                        type=kind, k=k, m=m, n_tokens=n, n_expert=0, n_used=0, max_s=0.15, realisation=ways[i]
                    )
                    samples[ways[i]].append(t["median_s"])
            # Half of the rounds decide, the other half judges.
            half = {way: statistics.median(times[0::2]) for way, times in samples.items()}
            seconds = {way: statistics.median(times[1::2]) for way, times in samples.items()}
            profile = profile_of(kind, (k, m), n, half)
            chosen = choose(Weight("MUL_MAT", kind, (k, m)), [(n, 1.0)], profile, usual=usual_realisation(profile, ()))
            taken = seconds[chosen.realisation or "plain"]
            yield {
                "what": "operator", "type": kind, "ne": [k, m], "n_tokens": n, "threads": threads,
                "median_s": seconds, "samples": samples, "chosen": chosen.realisation or "plain (no choice)",
                "over_plain": seconds["plain"] / taken,
                "over_repacked": seconds["repacked"] / taken if "repacked" in seconds else None,
            }  # fmt: skip


def profile_of(kind: str, ne: tuple[int, int], n_tokens: int, seconds: dict[str, float]) -> Profile:
    """A profile of these times alone."""
    times = tuple(
        OperatorTime(HOST, "MUL_MAT", kind, (*ne, 1), 1, n_tokens, s, realisation=way if len(seconds) > 1 else "")
        for way, s in seconds.items()
    )
    return Profile("", {}, (DeviceInfo(HOST, "", "cpu", 0, "CPU"),), times)


# ---- plans ---------------------------------------------------------------------------------------------------------


def realised_as(plan: PlacementPlan, realisation: str) -> PlacementPlan:
    """The same homes and modes, all in one realisation; "" as llama.cpp likes."""
    tensors = {
        name: replace(
            t, segments=tuple(replace(s, realisation=realisation if s.realisation else "") for s in t.segments)
        )
        for name, t in plan.tensors.items()
    }
    return replace(plan, tensors=tensors)


def plans(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        params = {way: LoadParams(n_threads=args.threads, load_mode=args.load_mode) for way in WAYS}
        if args.device == "RPC0":
            stack.enter_context(LocalRpcServer(threads=1))  # planned with
            for way in WAYS:
                server = stack.enter_context(LocalRpcServer(threads=1, register=False))
                params[way] = replace(params[way], rpc_servers=(server.endpoint,))
        for file_type in args.types:
            path = make_model(Path(folder) / f"{file_type}.gguf", shape=args.model_shape, file_type=file_type)
            settings = Settings(n_ctx=1024, n_threads=args.threads)
            choices = autoplan.Choices(
                device=args.device, planner="exact", workload=Workload(args.prompt, args.generate), streams=args.streams
            )
            made = start.plan_model(path, args.budget, settings, choices)
            made_as = {"default": realised_as(made, ""), "plain": realised_as(made, "plain"), "chosen": made}
            engines = [planned(made_as[way], runtime.lib_dir(), params[way], name=way) for way in WAYS]
            sweep = Sweep(
                prompts=(args.prompt,), gens=(args.generate,), repeats=args.rounds, interleave=args.interleave
            )
            results = run_bench(path, engines, sweep)
            on_host = [t for t in made.tensors.values() if t.device == HOST]
            realised = {r: sum(t.nbytes for t in on_host if t.realisation == r) for r in ("", *BOTH)}
            for metric in ("ttft_s", "tpot_s"):
                yield {
                    "what": "plan", "model": f"llama-{args.model_shape}-{file_type}", "device": args.device,
                    "budget": args.budget, "load_mode": args.load_mode, "interleave": args.interleave,
                    "host_bytes": realised, "notes": made.predicted.notes, **compared(results, metric),
                }  # fmt: skip


def compared(results: list[Result], metric: str) -> dict[str, Any]:
    samples = {result.engine: result.values(metric) for result in results}
    seconds = {name: statistics.median(times) for name, times in samples.items()}
    cell = results[0].cell
    return {
        "n_prompt": cell.prompt, "n_generate": cell.gen, "metric": metric, "median_s": seconds, "samples": samples,
        "over_default": seconds["default"] / seconds["chosen"], "over_plain": seconds["plain"] / seconds["chosen"],
    }  # fmt: skip


def main() -> None:
    parser = arguments(__doc__, "realisations")
    parser.add_argument("what", choices=("operators", "plans"))
    parser.add_argument("--shape", type=lambda text: tuple(map(int, text.split("x"))), default=(4096, 4096))
    parser.add_argument("--weights", type=words, default=TYPES)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--threads", type=int, default=len(cpu_set()))
    parser.add_argument("--device", default="RPC0", help="RPC0 starts a loopback server of one thread")
    parser.add_argument("--types", type=words, default=("Q4_0", "Q4_K_M"))
    parser.add_argument("--model-shape", default="small")
    parser.add_argument("--budget", default="50%")
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--generate", type=int, default=64)
    parser.add_argument("--load-mode", default="auto")
    parser.add_argument("--interleave", default="loaded", choices=("loaded", "reload"))
    parser.add_argument("--no-streams", dest="streams", action="store_false")
    args = parser.parse_args()
    record({"operators": operators, "plans": plans}[args.what](args), args.out, head={"machine": describe()})


if __name__ == "__main__":
    main()
