"""Decode of a mixture whose experts are on two devices: plans that divide experts against plans of whole weights.

python bench/experts.py [--out FILE.jsonl] [--routing zipf:1.8,zipf:0] [--shares 20,40,60] [--layers 5] [--type F16]
    [--tokens 40] [--rounds 5] [--link RATE] [--device CUDA0] [--threads 1] [--seconds S]

The model has layers of Qwen3-30B-A3B and a chosen routing (docs/experts.md; "+" stands for its comma). Routing "demo"
is the demo mixture with its own routing, reading its own kind of text; layers and type are then the model's. A loopback
RPC server of all cores is the accelerator, unless --device names one. Its F16 kernels are those of the host. shares:
percent of the experts' bytes that the budget holds beside all else. Plans of that budget: `experts`, by the most used
ones, and `slots`, by those used last; `exact`, whole weights; llama.cpp's --n-cpu-moe of the first and of the last
layers. `chosen` marks the one that the planner "auto" takes of these, `same_as` those that are equal and measured once.
Each plan is loaded anew in each round, and rounds are interleaved. All read the same tokens, which the model generated
once at temperature 0.8: a prompt of 64, some that fill slots, then those that are timed. One JSON line per routing,
share and plan: TPOT and TTFT in seconds, medians of the rounds, the same predicted, expected and measured hits of the
experts on the device, and how many times faster the chosen plan is, with intervals. --link: what loopback may carry
(tc's rate, as 8gbit) in a network namespace of its own; needs root. --seconds: no round begins later after the start.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from oallama import Llama, demo_model
from oallama.bench.machine import describe
from oallama.bench.script import arguments, note, numbers, record, words
from oallama.bench.stats import speedup
from oallama.data.layer_experts import layer_experts
from oallama.data.plan import PlacementPlan
from oallama.data.routing import RoutingTrace, StageRouting
from oallama.engine import native
from oallama.engine.load_settings import Settings
from oallama.engine.routers import routers_of
from oallama.engine.rpc import LocalRpcServer
from oallama.errors import OallamaError
from oallama.loading import autoplan, start
from oallama.loading.autoplan import Choices
from oallama.loading.routing_traces import keep_trace
from oallama.modelmaker import make_model
from oallama.planning import Workload
from oallama.planning.uncertainty import ranked
from oallama.storyteller import held_out_text
from oallama.tracing.experts import record_experts

PLANNERS = ("experts", "slots", "exact", "cpu-moe", "cpu-moe-last")
DEMO = "demo"
PROMPT = 64
WARM = 24  # tokens that fill slots
NARROWED = "OALLAMA_BENCH_NARROWED"  # set in the namespace
TRACED = 512  # generated tokens of the trace


def measured(args: Any) -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        device = args.device
        if not device:
            server = stack.enter_context(LocalRpcServer(threads=len(os.sched_getaffinity(0))))
            device = server.devices[0]
            os.environ["XDG_CACHE_HOME"] = folder  # traces of models that are gone
        for routing in (text.replace("+", ",") for text in args.routing):
            line = {"routing": routing, "link": args.link or ("" if args.device else "loopback")}
            if routing == DEMO:
                path = demo_model("mixture")
            else:
                note(f"{routing}: making the model")
                line |= {"type": args.type, "layers": args.layers}
                overrides = {"n_layer": args.layers, "n_vocab": 4096}
                path = Path(folder) / "m.gguf"
                make_model(path, shape="qwen3-30b-a3b", file_type=args.type, overrides=overrides, routing=routing)
            read = traced(path, held_out_text() if routing == DEMO else None, WARM + args.tokens)
            for share in args.shares:
                found = of_share(path, device, share, read, args)
                yield from (line | {"share": share} | plan for plan in found)


def traced(path: Path, text: str | None, n_tokens: int) -> list[int]:
    """Keeps a trace of the model reading `text` (None: random tokens), and generates the tokens that are timed."""
    watch = native.core().ExpertWatch()
    llm = Llama(str(path), n_ctx=1024, n_batch=64, n_ubatch=64, eval_callback=watch.addresses, verbose=False)
    try:
        read = llm.tokenize(text.encode())[:1024] if text else random_tokens(llm.n_vocab())
        learned = record_experts(llm, watch, read, TRACED)
        read = generated(llm, read[:PROMPT], n_tokens)
    finally:
        llm.close()
    routers = routers_of(path)
    assert routers is not None
    stages = {name: StageRouting.judge(ids, routers.n_experts) for name, ids in learned.ids.items()}
    keep_trace(RoutingTrace("", path.name, "random", routers, learned.layers, learned.n_ubatch, stages), path)
    return read


def random_tokens(n_vocab: int) -> list[int]:
    return [int(t) for t in np.random.default_rng(1).integers(300, n_vocab - 300, 1024)]


def generated(llm: Llama, prompt: list[int], n_tokens: int) -> list[int]:
    """The prompt, and tokens behind it, from another seed than the trace's."""
    llm.reset()
    llm.set_seed(2)
    llm.eval(prompt)
    tokens = list(prompt)
    for _ in range(n_tokens):
        tokens.append(llm.sample(top_k=40, top_p=1.0, min_p=0.0, temp=0.8))
        llm.eval(tokens[-1:])
    return tokens


def of_share(path: Path, device: str, share: int, read: list[int], args: Any) -> Iterator[dict[str, Any]]:
    settings = Settings(n_ctx=512, n_threads=args.threads)
    graph = autoplan.read_graph(path, settings)
    experts = sum(t.nbytes for t in graph.tensors if "_exps" in t.name)
    percent = 100 * (1 - (1 - share / 100) * experts / graph.weights_bytes)
    plans: dict[str, PlacementPlan] = {}
    for name in PLANNERS:
        choices = Choices(device=device, planner=name, workload=Workload(PROMPT, 256), streams=False)
        try:
            plans[name] = start.plan_model(path, f"{percent:.2f}%", settings, choices)
        except OallamaError as error:
            yield {"planner": name, "refused": str(error)}
    chosen = ranked(plans)[0]
    first: dict[str, str] = {}  # of the plans that place all alike
    same_as = {name: first.setdefault(plan.to_backend_map(), name) for name, plan in plans.items()}
    rounds: dict[str, list[Times]] = {name: [] for name in first.values()}
    for number in range(args.rounds):
        if number and time.monotonic() > args.end:
            note(f"{share} %: no time for round {number + 1}")
            break
        note(f"{share} %: round {number + 1}")
        for name in list(rounds)[:: 1 if number % 2 else -1]:
            rounds[name].append(timed(path, plans[name], read, args.threads))
    rounds = {name: rounds[same] for name, same in same_as.items()}
    for name, plan in plans.items():
        expected, layers = plan.predicted.experts, [place.layer for place in layer_experts(plan)]
        tpot, ttft = ([getattr(times, what) for times in rounds[name]] for what in ("tpot_s", "ttft_s"))
        faster = {
            f"chosen_times_{what}": speedup(own, [getattr(times, what) for times in rounds[chosen]]).to_json()
            for what, own in (("tpot_s", tpot), ("ttft_s", ttft))
        }
        yield {
            "planner": name, "same_as": same_as[name], "chosen": name == chosen,
            "device": device, "budget": f"{percent:.2f}%",
            "tpot_s": statistics.median(tpot), "ttft_s": statistics.median(ttft),
            "predicted_tpot_s": plan.predicted.tpot_s[min(plan.predicted.tpot_s)],
            "predicted_ttft_s": plan.predicted.ttft_s[PROMPT], **faster,
            "weights_bytes": plan.predicted.devices[device].weights,
            "expected_hits": expected.share("decode", layers) if expected else None,
            "hits": hits_of(plan, rounds[name]), "uploads": statistics.fmean(times.uploads for times in rounds[name]),
            "held": [place.held for place in layer_experts(plan)], "rounds": tpot, "ttft_rounds": ttft,
        }  # fmt: skip


@dataclass(frozen=True)
class Times:
    """Of one load. hits: of divided layers, counted by the engine over the tokens that were timed; None without any.

    uploads: experts that entered slots with a token, of all layers.
    """

    ttft_s: float
    tpot_s: float
    hits: float | None
    uploads: float


def timed(path: Path, plan: PlacementPlan, tokens: list[int], n_threads: int) -> Times:
    llm = Llama(str(path), plan=plan, n_ctx=512, n_threads=n_threads, verbose=False, verify=False)
    try:
        llm.eval(tokens[:PROMPT])  # the first one also waits for pages of the mapped file
        llm.reset()
        ttft = seconds(llm, tokens[:PROMPT])
        for token in tokens[PROMPT:][:WARM]:
            llm.eval([token])
        before = counted(llm)
        tpot = statistics.median(seconds(llm, [token]) for token in tokens[PROMPT + WARM :])
        uses, hits, uploads = counted(llm) - before
    finally:
        llm.close()
    return Times(ttft, tpot, float(hits / uses) if uses else None, float(uploads) / len(tokens[PROMPT + WARM :]))


def counted(llm: Llama) -> np.ndarray:
    """Uses, hits and uploads so far."""
    return np.array([(c.uses, c.hits, c.uploads) for c in llm.expert_counts()]).reshape(-1, 3).sum(axis=0)


def seconds(llm: Llama, tokens: list[int]) -> float:
    """Until all devices are done."""
    from llama_cpp import llama_synchronize  # behind oallama

    since = time.perf_counter()
    llm.eval(tokens)
    llama_synchronize(llm.ctx)
    return time.perf_counter() - since


def hits_of(plan: PlacementPlan, rounds: Sequence[Times]) -> float:
    """The share of the timed tokens' uses that the device computed, all layers together."""
    divided = [times.hits for times in rounds if times.hits is not None]
    shares = [
        statistics.fmean(divided) if place.held else float(place.home == plan.devices[0])
        for place in layer_experts(plan)
    ]
    return round(statistics.fmean(shares), 4)


def narrow(rate: str) -> None:
    """Run this program again, where loopback carries no more than `rate`."""
    os.environ[NARROWED] = "1"
    shaped = "ip link set lo up && tc qdisc add dev lo root tbf rate $0 burst 1mb latency 50ms && exec $@"
    os.execvp("unshare", ["unshare", "-n", "sh", "-c", shaped, rate, sys.executable, *sys.argv])


def main() -> None:
    parser = arguments(__doc__, "experts")
    parser.add_argument("--routing", type=words, default=["zipf:1.8", "zipf:0"])
    parser.add_argument("--shares", type=numbers, default=(20, 40, 60), help="percent of the experts' bytes")
    parser.add_argument("--layers", type=int, default=5)
    parser.add_argument("--type", default="F16", help="of the weights")
    parser.add_argument("--tokens", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--link", default="", help="what loopback may carry, as 8gbit")
    parser.add_argument("--device", default="", help="ggml's name of the accelerator (default: a loopback RPC server)")
    parser.add_argument("--threads", type=int, default=1, help="of the host (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="in which rounds begin (default: no limit)")
    args = parser.parse_args()
    args.end = time.monotonic() + args.seconds
    if args.link and not os.environ.get(NARROWED):
        narrow(args.link)
    record(measured(args), args.out, each={"machine": describe()})


if __name__ == "__main__":
    main()
