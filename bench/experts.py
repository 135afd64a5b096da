"""Decode of a mixture whose experts are on two devices: the planner `experts` against plans of whole weights.

python bench/experts.py [--out FILE.jsonl] [--routing zipf:1.2,zipf:0] [--shares 20,40,60] [--layers 4] [--tokens 32]
    [--rounds 5]

The model has layers of Qwen3-30B-A3B and a chosen skew of its experts' use (docs/experts.md). A loopback RPC server
of all cores is the accelerator; the host has one thread and plain weights, as the server has: its faster layouts
would make it the faster of the two. shares: percent of the experts' bytes that the budget holds beside all else.
Rivals have the same budget: `exact`, whole weights, and llama.cpp's --n-cpu-moe of the first and of the last layers.
Each plan is loaded anew in each round, and rounds are interleaved. Tokens are text tokens at random, one at a time:
what a model with random weights would generate falls into cycles. One JSON line per skew, share and plan: TPOT in
seconds, median of the rounds, predicted TPOT, expected and measured hits of the experts on the device, and how many
times faster `experts` is, with the interval.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from oallama import Llama
from oallama.bench.machine import describe
from oallama.bench.script import arguments, note, numbers, record, words
from oallama.bench.stats import speedup
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
from oallama.tracing.experts import record_experts

PLANNERS = ("experts", "exact", "cpu-moe", "cpu-moe-last")
PROMPT = 64


def measured(args: Any) -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder, LocalRpcServer(threads=len(os.sched_getaffinity(0))) as server:
        os.environ["XDG_CACHE_HOME"] = folder  # traces of models that are gone
        for routing in args.routing:
            note(f"{routing}: making the model")
            overrides = {"n_layer": args.layers, "n_vocab": 4096}
            path = Path(folder) / "m.gguf"
            make_model(path, shape="qwen3-30b-a3b", file_type=args.type, overrides=overrides, routing=routing)
            ids = traced(path, args.tokens)
            for share in args.shares:
                line = {"routing": routing, "type": args.type, "layers": args.layers, "share": share}
                yield from (line | found for found in of_share(path, server.devices[0], share, ids, args))


def text_tokens(llm: Llama, n: int, seed: int) -> list[int]:
    """Text tokens at random."""
    return [int(t) for t in np.random.default_rng(seed).integers(300, llm.n_vocab() - 300, n)]


def traced(path: Path, n_tokens: int) -> np.ndarray:
    """Keeps a trace of the model, and returns the experts of the tokens that are measured [layers, tokens, used]."""
    watch = native.core().ExpertWatch()
    llm = Llama(str(path), n_ctx=1024, n_batch=64, n_ubatch=64, eval_callback=watch.addresses, verbose=False)
    try:
        learned = record_experts(llm, watch, text_tokens(llm, 1024, seed=1), 256)
        used = record_experts(llm, watch, text_tokens(llm, PROMPT + n_tokens, seed=2), 8)
    finally:
        llm.close()
    routers = routers_of(path)
    assert routers is not None
    stages = {name: StageRouting.judge(ids, routers.n_experts) for name, ids in learned.ids.items()}
    keep_trace(RoutingTrace("", path.name, "random", routers, learned.layers, learned.n_ubatch, stages), path)
    return used.ids["prefill"][:, PROMPT:]


def of_share(path: Path, device: str, share: int, ids: np.ndarray, args: Any) -> Iterator[dict[str, Any]]:
    settings = Settings(n_ctx=512, n_threads=1)
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
    rounds: dict[str, list[float]] = {name: [] for name in plans}
    for number in range(args.rounds):
        note(f"{share} %: round {number + 1}")
        for name in list(plans)[:: 1 if number % 2 else -1]:
            rounds[name].append(tpot(path, plans[name], len(ids[0])))
    for name, plan in plans.items():
        expected, hits = hits_of(plan, ids)
        ratio = speedup(rounds[name], rounds["experts"]) if "experts" in rounds else None
        yield {
            "planner": name, "device": device, "budget": f"{percent:.2f}%", "tpot_s": statistics.median(rounds[name]),
            "predicted_s": plan.predicted.tpot_s[min(plan.predicted.tpot_s)],
            "experts_times": ratio.to_json() if ratio else None,
            "weights_bytes": plan.predicted.devices[device].weights, "notes": expected, "hits": hits,
            "rounds": rounds[name],
        }  # fmt: skip


def tpot(path: Path, plan: PlacementPlan, n_tokens: int) -> float:
    llm = Llama(str(path), plan=plan, n_ctx=512, n_threads=1, verbose=False, verify=False)
    try:
        tokens = text_tokens(llm, PROMPT + n_tokens, seed=2)
        llm.eval(tokens[:PROMPT])
        llm.eval(tokens[PROMPT:][:2])
        times = [timed(llm, token) for token in tokens[PROMPT + 2 :]]
    finally:
        llm.close()
    return statistics.median(times)


def timed(llm: Llama, token: int) -> float:
    since = time.perf_counter()
    llm.eval([token])
    return time.perf_counter() - since


def hits_of(plan: PlacementPlan, ids: np.ndarray) -> tuple[Sequence[str], float]:
    """What the plan expects of its experts, and the share of the tokens' uses that the device computes."""
    there = [set[int]() for _ in ids]
    for name, tensor in plan.tensors.items():
        if "ffn_up_exps" in name:
            layer = int(name.split(".")[1])
            whole = set(range(int(ids.max()) + 1)) if tensor.device != "CPU" else set()
            there[layer] = whole | set(*(s.experts for s in tensor.segments[1:]))
    hits = [np.isin(layer, list(held)).mean() for layer, held in zip(ids, there, strict=True)]
    return [n for n in plan.predicted.notes if n.startswith("expected on")], round(float(np.mean(hits)), 4)


def main() -> None:
    parser = arguments(__doc__, "experts")
    parser.add_argument("--routing", type=words, default=["zipf:1.2", "zipf:0"])
    parser.add_argument("--shares", type=numbers, default=(20, 40, 60), help="percent of the experts' bytes")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--type", default="Q8_0", help="of the weights")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    record(measured(args), args.out, each={"machine": describe()})


if __name__ == "__main__":
    main()
