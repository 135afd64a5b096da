"""A mixture on cards that are not here: tokens per second of every way to place its experts, predicted.

python bench/experts_datasheets.py [--shape qwen3-30b-a3b] [--routing zipf:1.2,zipf:0+locality:0.65]
    [--n-prompt 512] [--n-generate 256] [--out FILE.jsonl]
python bench/experts_datasheets.py --tables FILE.jsonl

Nothing is measured but the routing traces. For each routing a model with the shape's routers and narrow experts is made
and runs a text here. The shape itself is a sparse file with the same routers, so the trace holds for it. Cards, their
budgets and the type of the weights are CARDS: types that the card cannot hold as a whole. One JSON line per card,
routing and planner. `--tables` prints the lines. In a routing "+" stands for its comma.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oallama import Llama
from oallama.bench.machine import describe
from oallama.bench.script import arguments, note, read, record, words
from oallama.cli.routing import MIXED_TEXT
from oallama.data.layer_experts import layer_experts
from oallama.data.plan import PlacementPlan
from oallama.data.routing import RoutingTrace, StageRouting
from oallama.engine import native
from oallama.engine.load_settings import Settings
from oallama.engine.routers import routers_of
from oallama.errors import OallamaError
from oallama.loading import autoplan
from oallama.loading.autoplan import Choices
from oallama.loading.routing_traces import keep_trace
from oallama.modelmaker import make_model, make_sparse_model
from oallama.planning import Workload
from oallama.profiling.datasheet import Datasheet, make_profile
from oallama.tracing.experts import record_experts

N_CTX, TEXT_TOKENS, GENERATED = 4096, 1024, 512
NARROW = {"n_ff_expert": 64, "n_head": 4, "n_head_kv": 2}


@dataclass(frozen=True)
class Card:
    """A datasheet, what the plan may use of its card's memory, and the type of the weights."""

    sheet: str
    budget: str
    file_type: str


CARDS = (
    Card("rtx3060-ddr4", "11GiB", "Q4_K_M"),
    Card("rtx4070-ddr5", "11GiB", "Q4_K_M"),
    Card("rtx4090-ddr5", "22GiB", "Q8_0"),
    Card("rtx3090-x4-ddr4", "22GiB", "Q8_0"),
    Card("rtx5090-ddr5", "30GiB", "F16"),
)
PLANNERS = {
    "cpu": "host alone",
    "cpu-moe": "first N",
    "cpu-moe-last": "last N",
    "exact": "whole tensors",
    "experts": "static experts",
    "slots": "slots",
    "auto": "chosen",
}


def predicted(options: Any) -> Iterator[dict[str, Any]]:
    workload = Workload(options.n_prompt, options.n_generate)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["XDG_CACHE_HOME"] = name  # traces of models that are gone
        for routing in (text.replace("+", ",") for text in options.routing):
            note(f"{routing}: tracing")
            found = traced(folder, options.shape, routing)
            for card in CARDS:
                path = folder / "sparse.gguf"
                make_sparse_model(path, shape=options.shape, file_type=card.file_type, routing=routing)
                keep_trace(found, path)
                line = {"what": "predicted", "shape": options.shape, "routing": routing, **vars(card)}
                yield from (line | made for made in of_card(path, card, workload))


def traced(folder: Path, shape: str, routing: str) -> RoutingTrace:
    """The routing of the shape's routers on our mixed text, by a model whose experts and attention are narrow."""
    path = make_model(folder / "narrow.gguf", shape=shape, file_type="Q4_0", routing=routing, overrides=NARROW)
    watch = native.core().ExpertWatch()
    llm = Llama(str(path), n_ctx=1024, n_batch=256, n_ubatch=256, eval_callback=watch.addresses, verbose=False)
    try:
        tokens = llm.tokenize(MIXED_TEXT.read_bytes())[:TEXT_TOKENS]
        recorded = record_experts(llm, watch, tokens, GENERATED)
    finally:
        llm.close()
    routers = routers_of(path)
    path.unlink()
    assert routers is not None
    stages = {name: StageRouting.judge(ids, routers.n_experts) for name, ids in recorded.ids.items()}
    return RoutingTrace("", shape, MIXED_TEXT.name, routers, recorded.layers, recorded.n_ubatch, stages)


def of_card(path: Path, card: Card, workload: Workload) -> Iterator[dict[str, Any]]:
    sheet = Datasheet.load(card.sheet)
    settings = Settings(n_ctx=N_CTX, n_threads=sheet.cpu.cores)
    graph = autoplan.read_graph(path, settings)
    profile = make_profile(graph, sheet)
    host = {
        "cores": sheet.cpu.cores,
        "dram_gb_s": sheet.cpu.dram_gb_s,
        "link_gb_s": sheet.accelerators[0].link.peak_gb_s,
    }
    for name in PLANNERS:
        note(f"{card.sheet}: {name}")
        choices = Choices(profile=profile, elsewhere=True, workload=workload, planner=name)
        since = time.perf_counter()
        try:
            plan = autoplan.plan_graph(path, graph, card.budget, settings, choices)
        except OallamaError as error:
            yield {"planner": name, **host, "refused": str(error)}
            continue
        took = {"planning_s": round(time.perf_counter() - since, 2)}
        yield {"planner": name, **host, **described(plan, workload), **took}


def described(plan: PlacementPlan, workload: Workload) -> dict[str, Any]:
    expected, layers = plan.predicted.experts, [place.layer for place in layer_experts(plan)]
    assert expected is not None
    prefill, decode = (sum(plan.predicted.parts[stage].values()) for stage in ("prefill", "decode"))
    return {
        "prompt_tokens_s": workload.n_prompt / prefill, "tokens_s": (workload.n_generate - 1) / decode,
        "request_s": plan.predicted.request_s, "n_ubatch": plan.context.n_ubatch,
        "params": dict(plan.planner["params"]), "routing_known": expected.routing,
        "hits": expected.share("decode", layers), "prompt_hits": expected.share("prefill", layers),
        "held": [expected.layers[layer].held if layer in expected.layers else 0 for layer in layers],
        "parts": {stage: dict(causes) for stage, causes in plan.predicted.parts.items()},
    }  # fmt: skip


def table(lines: list[dict[str, Any]]) -> str:
    """Markdown: a row per card and routing, tokens per second of each way; the fastest of them is bold.

    hits: shares of a generated token's uses on the card, with static experts and with slots.
    """
    names = list(PLANNERS)
    rows = [
        f"| card | host | weights | budget | routing | {' | '.join(PLANNERS.values())} | best / --n-cpu-moe | hits |",
        f"|---|---|---|---|---|{'--:|' * (len(names) + 2)}",
    ]
    cells: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for line in lines:
        cells.setdefault((line["sheet"], line["routing"]), []).append(line)
    for (sheet, routing), found in cells.items():
        speed = {line["planner"]: line["tokens_s"] for line in found if "tokens_s" in line}
        best = max(speed.values())
        shown = [
            f"**{speed[n]:.1f}**" if speed.get(n) == best else f"{speed[n]:.1f}" if n in speed else "-" for n in names
        ]
        rival = max(speed.get(name, 0.0) for name in ("cpu-moe", "cpu-moe-last"))
        gain = f"{best / rival:.2f}x"
        share = {line["planner"]: f"{line['hits']:.0%}" for line in found if "hits" in line}
        hits = f"{share.get('experts', '-')}, {share.get('slots', '-')}"
        first = found[0]
        host = f"{first['cores']} cores, {first['dram_gb_s']:g} GB/s"
        start = f"| {sheet} | {host} | {first['file_type']} | {first['budget']} | `{routing}` |"
        rows.append(f"{start} {' | '.join(shown)} | {gain} | {hits} |")
    return "\n".join(rows)


def main() -> None:
    parser = arguments(__doc__, "experts-datasheets")
    parser.add_argument("--shape", default="qwen3-30b-a3b")
    parser.add_argument("--routing", type=words, default=["zipf:1.2", "zipf:0+locality:0.65"])
    parser.add_argument("--n-prompt", type=int, default=512)
    parser.add_argument("--n-generate", type=int, default=256)
    parser.add_argument("--tables", type=Path)
    options = parser.parse_args()
    if options.tables:
        print(table([line for line in read(options.tables) if line.get("what") == "predicted"]))
        return
    record(predicted(options), options.out, each={"machine": describe()})


if __name__ == "__main__":
    main()
