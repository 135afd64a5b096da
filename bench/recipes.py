"""Measures what recipes cost in quality, and what the search for types gains.

python bench/recipes.py MODEL.gguf TEXT [--out FILE.jsonl] [--plot FILE.png] [--vram 3MiB --datasheet NAME]

The first half of the text is searched on, the second half scores: no choice has seen it. Writes the machine, then JSON
lines: "recipe", every recipe with a name that needs no importance matrix; "search", per budget the best found types
against the best uniform type and the best mix of llama.cpp's in the same bytes; "sum", how well the divergences of
groups alone add up to what is measured. With --vram types and places are chosen together: "frontier", predicted TPOT
(by the planner) and divergence of every trial; --datasheet predicts for that machine, --slower N for one N times as
slow, to which megabytes are what gigabytes are to the real one. Bytes are of the whole file, divergences in nats.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from oallama.bench.machine import describe
from oallama.bench.script import arguments, progress, record
from oallama.engine.load_settings import Settings
from oallama.engine.rpc import LocalRpcServer
from oallama.errors import OallamaError
from oallama.loading import autoplan
from oallama.loading.autoplan import Choices
from oallama.profiling.datasheet import Datasheet, make_profile
from oallama.quantizing import (
    DEFAULT_TYPES,
    Laboratory,
    Machine,
    Reference,
    Search,
    Trial,
    described,
    measure_importance,
    named,
    quantize,
)
from oallama.quantizing.machine import retyped
from oallama.views.frontier_plot import write_frontier

MIX = "llama.cpp"


def halves(text: str) -> tuple[str, str]:
    """The text, cut at a line's end near its middle."""
    cut = text.find("\n", len(text) // 2) + 1
    return text[:cut], text[cut:]


def recipes(model: Path, score: Reference) -> Iterator[dict[str, Any]]:
    """Every recipe with a name; those that need an importance matrix are left out."""
    with tempfile.TemporaryDirectory() as folder:
        for name, kind, _ in described():
            target = Path(folder) / "recipe.gguf"
            try:
                found = quantize(model, target, named(name))
            except OallamaError as error:
                yield {"what": "recipe", "recipe": name, "kind": kind, "left_out": str(error)}
                continue
            fell_back = len(found.fallbacks)
            line = {"recipe": name, "kind": kind, "fell_back": fell_back, "types": found.describe()}
            yield {"what": "recipe", **line, **asdict(score.compare(target))}


def against(search: Search, score: Laboratory, lines: list[dict[str, Any]], budget: int) -> dict[str, Any]:
    """The best of the search, of uniform types and of llama.cpp's mixes within a budget, on both halves."""

    def told(trial: Trial) -> dict[str, Any]:
        scored = score.measure(trial.types)
        return {
            "name": trial.name, "file_bytes": trial.file_bytes, "kld_searched": trial.kld,
            "kld_scored": scored.kld, "kld_scored_error": scored.kld_error, "perplexity_scored": scored.perplexity,
        }  # fmt: skip

    mixes = [r for r in lines if r.get("kind") == MIX and r.get("file_bytes", budget + 1) <= budget]
    mix = min(mixes, key=lambda r: r["kld"], default=None)
    best, uniform = told(search.best(budget)), told(search.best(budget, kinds=["uniform"]))
    return {
        "what": "search",
        "budget_bytes": budget,
        "best": best,
        "uniform": uniform,
        "mix": None if mix is None else {"name": mix["recipe"], "file_bytes": mix["file_bytes"], "kld": mix["kld"]},
        "kld_ratio_searched": best["kld_searched"] / uniform["kld_searched"] if uniform["kld_searched"] else 1.0,
        "kld_ratio_scored": best["kld_scored"] / uniform["kld_scored"] if uniform["kld_scored"] else 1.0,
    }


def sums(search: Search) -> dict[str, Any]:
    """Measured divergence over the sum of the groups', of every trial that has both."""
    pairs = [(t.expected, t.kld) for t in search.trials if t.expected > 0]
    ratios = [measured / expected for expected, measured in pairs]
    return {
        "what": "sum",
        "trials": [{"name": t.name, "expected": t.expected, "measured": t.kld} for t in search.trials],
        "measured_over_sum": {"min": min(ratios), "median": statistics.median(ratios), "max": max(ratios)},
    }


def frontier(search: Search) -> Iterator[dict[str, Any]]:
    front = {id(trial) for trial in search.front()}
    for trial in sorted(search.trials, key=lambda t: t.tpot_s or 0.0):
        assert trial.plan is not None
        memory = {name: asdict(bytes) for name, bytes in trial.plan.predicted.devices.items()}
        yield {
            "what": "frontier", "name": trial.name, "kind": trial.kind, "file_bytes": trial.file_bytes,
            "kld": trial.kld, "predicted_tpot_s": trial.tpot_s, "on_front": id(trial) in front,
            "planner": trial.plan.planner["name"], "memory": memory,
        }  # fmt: skip


def made_machine(args: argparse.Namespace, types: Sequence[str]) -> Machine:
    """This machine with a loopback RPC server as its accelerator, or that of a datasheet."""
    settings = Settings(n_ctx=512, n_threads=args.threads)
    if not args.datasheet:
        return Machine(args.model, args.vram, settings, Choices(device=LocalRpcServer().devices[0]))
    sheet = slowed(Datasheet.load(args.datasheet), args.slower)
    graph = autoplan.read_graph(args.model, settings)
    graphs = [graph, *(retyped(graph, {t.name: type for t in graph.tensors}) for type in types)]
    profiles = [make_profile(each, sheet) for each in graphs]
    operators = {(o.device, o.op, o.type, o.ne, o.n_used, o.n_tokens): o for p in profiles for o in p.operators}
    profile = replace(profiles[0], operators=tuple(operators.values()))
    return Machine(args.model, args.vram, settings, Choices(profile=profile, elsewhere=True))


def slowed(sheet: Datasheet, factor: float) -> Datasheet:
    """The machine with every bandwidth and every flop/s divided by a factor; fixed costs stay."""
    cpu = replace(sheet.cpu, dram_gb_s=sheet.cpu.dram_gb_s / factor, ghz=sheet.cpu.ghz / factor)
    accelerators = tuple(
        replace(
            a,
            memory_gb_s=a.memory_gb_s / factor,
            fp16_tflops=a.fp16_tflops / factor,
            link=replace(a.link, pcie_gb_s=a.link.pcie_gb_s / factor),
        )
        for a in sheet.accelerators
    )
    return replace(sheet, cpu=cpu, accelerators=accelerators)


def measure(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    seen, unseen = halves(args.text.read_text(encoding="utf-8"))
    reference = Reference(args.model, seen, args.chunk, args.chunks, n_threads=args.threads)
    scores = Reference(args.model, unseen, args.chunk, args.chunks, n_threads=args.threads)
    chunks = {"searched": len(reference.chunks), "scored": len(scores.chunks), "tokens_each": args.chunk}
    yield {"what": "text", "model": args.model.name, "text": args.text.name, "chunks": chunks}
    named_recipes = []
    if not args.vram:
        for line in recipes(args.model, scores):
            named_recipes.append(line)
            yield line
    lab, score = Laboratory(args.model, reference), Laboratory(args.model, scores)
    start = time.perf_counter()
    importance = measure_importance(lab, args.types.split(","), args.group, progress)
    measured_s = time.perf_counter() - start
    machine = made_machine(args, importance.types) if args.vram else None
    search = Search(lab, importance, machine, progress)
    uniform = [lab.file_bytes(types) for type in importance.types if (types := lab.uniform(type)) is not None]
    middle = [(a + b) // 2 for a, b in zip(sorted(uniform), sorted(uniform)[1:], strict=False)]
    search.run(sorted({*uniform, *middle}) if machine is None else [max(uniform)], args.points)
    n = {"groups": len(importance.groups), "types": len(importance.types), "seconds": measured_s}
    yield {"what": "importance", "grouping": args.group, **n, "kld": table(importance)}
    yield sums(search)
    if machine is None:
        for budget in sorted({*uniform, *middle}):
            yield against(search, score, named_recipes, budget)
    else:
        yield from frontier(search)
    if args.plot:
        write_frontier(search.trials, args.plot, f"{args.model.name} on {args.text.name}")


def table(importance: Any) -> dict[str, dict[str, float]]:
    return {
        group.name: {t: float(k) for t, k in zip(importance.types, row, strict=True) if k < float("inf")}
        for group, row in zip(importance.groups, importance.kld, strict=True)
    }


def main() -> None:
    parser = arguments(__doc__, "recipes")
    parser.add_argument("model", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--types", default=",".join(DEFAULT_TYPES))
    parser.add_argument("--group", default="third")
    parser.add_argument("--chunk", type=int, default=256)
    parser.add_argument("--chunks", type=int)
    parser.add_argument("--vram", help="choose places too, within these bytes of an accelerator")
    parser.add_argument("--datasheet", help="of the machine; default: this one with a loopback RPC server")
    parser.add_argument("--slower", type=float, default=1.0, help="divides bandwidths and flop/s of the datasheet")
    parser.add_argument("--points", type=int, default=6)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    record(measure(args), args.out, head={"machine": describe()})


if __name__ == "__main__":
    main()
