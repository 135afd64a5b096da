"""Predicts the OATO paper's study on the paper's machine and prints it beside the reported numbers.

python -m oallama.studies.paper.study [--out STEM] [--planners oato-paper,oato,exact,divided,stream-all,auto,auto-each]
    [--models qwq-32b,...] [--shares 0.25,0.5,0.75] [--datasheet rtx4090-xeon4314]

There is one plan per model and share, for 64 + 32 tokens; "auto-each" is auto with a plan per prompt length.
Nothing is measured: the profile is computed from a datasheet, and memory is dry-run on a stand-in device of this
machine. Writes STEM.jsonl, one line per model, share and engine, and STEM.md. See docs/paper.md.
"""

from __future__ import annotations

import math
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from oallama.bench.machine import describe
from oallama.bench.script import arguments, record, words
from oallama.data.plan import HOST, PlacementPlan
from oallama.data.profile import Profile
from oallama.engine.load_settings import Settings
from oallama.errors import OallamaError
from oallama.loading import autoplan
from oallama.loading.autoplan import Choices
from oallama.modelmaker import make_sparse_model
from oallama.planning import OperatorGraph, Workload
from oallama.profiling.datasheet import Datasheet, make_profile
from oallama.studies.paper.flexgen import FlexGen
from oallama.studies.paper.reported import CLAIMS, FLEXGEN, LLAMA_CPP, Claim

MODELS = ("llama3-8b", "minicpm3-4b", "qwq-32b")
SHARES = (0.25, 0.50, 0.75)
REQUEST = Workload(64, 32)
PROMPTS = (32, 64, 128, 256, 512)
GENERATED = (32, 64, 128)
SETTINGS = Settings(n_ctx=1024)  # the paper's requests have at most 1024 tokens
PAPER = "oato-paper"  # OATO literally as published; every other name is a planner of ours
EACH = "auto-each"  # auto, with a plan for each prompt length
PLANNERS = (PAPER, "oato", "exact", "divided", "stream-all", "auto", EACH)


@dataclass(frozen=True)
class Row:
    """Predicted seconds of one engine. gpu_bytes: weights on the GPU. planner: what "auto" took, else the engine's."""

    model: str
    share: float
    engine: str
    planner: str
    gpu_bytes: int
    request_s: float
    ttft_s: Mapping[int, float]
    tpot_s: Mapping[int, float]
    notes: Sequence[str]

    def seconds(self, metric: str) -> dict[int, float]:
        """By prompt length for "ttft"; one number, under 0, for the request."""
        return dict(self.ttft_s) if metric == "ttft" else {0: self.request_s}


def main() -> None:
    parser = arguments(__doc__, "paper", suffix="")
    parser.add_argument("--planners", type=words, default=PLANNERS)
    parser.add_argument("--models", type=words, default=MODELS)
    parser.add_argument("--shares", type=lambda text: [float(s) for s in text.split(",")], default=SHARES)
    parser.add_argument("--datasheet", default="rtx4090-xeon4314")
    options = parser.parse_args()
    sheet = Datasheet.load(options.datasheet)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        for model in options.models:
            path = make_sparse_model(Path(folder) / f"{model}.gguf", shape=model, file_type="F16")
            rows += study(model, path, sheet, options.shares, options.planners)
    common = {"schema": 1, "what": "paper", "datasheet": sheet.name, **describe()}
    record(map(asdict, rows), options.out.with_suffix(".jsonl"), each=common, quiet=True)
    text = report(rows, sheet.name, options.planners)
    options.out.with_suffix(".md").write_text(text)
    print(text)


def study(model: str, path: Path, sheet: Datasheet, shares: Iterable[float], planners: Sequence[str]) -> Iterable[Row]:
    """llama.cpp's layer split under each share; FlexGen and our planners with the bytes that it then has on the GPU."""
    graph = autoplan.read_graph(path, SETTINGS)
    profile = make_profile(graph, sheet)
    for share in shares:
        print(f"{model}, {share:.0%} of the weights", file=sys.stderr)
        layers = plan(path, graph, profile, int(share * graph.weights_bytes), "layers")
        yield from_plan(model, share, LLAMA_CPP, layers)
        yield flexgen(model, share, graph, profile, layers)
        same_bytes = gpu_bytes(layers)
        for name in planners:
            try:
                if name == EACH:
                    each = {n: plan(path, graph, profile, same_bytes, "auto", n) for n in PROMPTS}
                    yield from_plans(model, share, each)
                else:
                    yield from_plan(model, share, name, plan(path, graph, profile, same_bytes, name))
            except OallamaError as error:
                print(f"{name}: {error}", file=sys.stderr)


def plan(
    path: Path,
    graph: OperatorGraph,
    profile: Profile,
    weights: int,
    name: str,
    n_prompt: int = REQUEST.n_prompt,
) -> PlacementPlan:
    """A planner's plan with at most `weights` bytes of weights on the GPU; KV cache and compute buffers come on top."""
    planner: Any = "oato" if name == PAPER else name
    workload = replace(REQUEST, n_prompt=n_prompt)
    choices = Choices(
        profile=profile, planner=planner, paper=name == PAPER, workload=workload, fraction=1.0, elsewhere=True
    )
    percent = 100 * Fraction(weights, graph.weights_bytes)
    budget = f"{math.ceil(percent * 10**9) / 10**9:.9f}%"  # rounded up, by less than a byte
    return autoplan.plan_graph(path, graph, budget, SETTINGS, choices)


def gpu_bytes(made: PlacementPlan) -> int:
    """Weights on the GPU."""
    return sum(memory.weights for name, memory in made.predicted.devices.items() if name != HOST)


def from_plan(model: str, share: float, engine: str, made: PlacementPlan) -> Row:
    predicted = made.predicted
    depths = sorted(predicted.tpot_s)
    tpots = [predicted.tpot_s[depth] for depth in depths]
    tpot = {n: float(np.interp(REQUEST.n_prompt + n // 2, depths, tpots)) for n in GENERATED}
    ttft = {n: predicted.ttft_s[n] for n in PROMPTS}
    planner = made.planner["name"]
    return Row(model, share, engine, planner, gpu_bytes(made), predicted.request_s, ttft, tpot, predicted.notes)


def from_plans(model: str, share: float, made: Mapping[int, PlacementPlan]) -> Row:
    """Each prompt length by its own plan; request and TPOT by that of the request's prompt."""
    row = from_plan(model, share, EACH, made[REQUEST.n_prompt])
    names = dict.fromkeys(str(each.planner["name"]) for each in made.values())
    ttft = {n: each.predicted.ttft_s[n] for n, each in made.items()}
    return replace(row, planner=", ".join(names), ttft_s=ttft)


def flexgen(model: str, share: float, graph: OperatorGraph, profile: Profile, layers: PlacementPlan) -> Row:
    device = layers.devices[0]
    resident = gpu_bytes(layers)
    engine = FlexGen(graph, profile, device, resident / graph.weights_bytes)
    ttft = {n: engine.ttft(n) for n in PROMPTS}
    tpot = {n: engine.tpot(REQUEST.n_prompt + n // 2) for n in GENERATED}
    request_s = engine.request(REQUEST.n_prompt, REQUEST.n_generate)
    return Row(model, share, FLEXGEN, "streaming", resident, request_s, ttft, tpot, ())


# ---- report --------------------------------------------------------------------------------------------------------


def report(rows: Sequence[Row], sheet: str, planners: Sequence[str]) -> str:
    """Markdown: the claims beside the predictions, then all predicted seconds."""
    found = {(row.model, row.share, row.engine): row for row in rows}
    engines = [name for name in planners if any(row.engine == name for row in rows)]
    lines = [
        f"# The OATO paper's study, predicted for {sheet}",
        "",
        "Computed from a datasheet, not measured. A cell is `faster by / less time`: t(baseline) / t(engine) - 1 and "
        "1 - t(engine) / t(baseline), in percent; which of the two the paper reports is not known. TTFT: the "
        "best and the worst prompt length, in brackets. The paper's QwQ numbers come without a share: all are shown.",
        "",
        f"| model | on the GPU | metric | against | reported | {' | '.join(engines)} |",
        f"|---|---:|---|---|---:|{'---:|' * len(engines)}",
    ]
    for claim in CLAIMS:
        lines += _claim_lines(claim, found, engines)
    lines += [
        "",
        "## Predicted seconds",
        "",
        "| model | on the GPU | engine | planner | weights on the GPU | E2E 64+32 | "
        + " | ".join(f"TTFT {n}" for n in PROMPTS)
        + " | "
        + " | ".join(f"TPOT {n}" for n in GENERATED)
        + " |",
        "|---|---:|---|---|---:|" + "---:|" * (1 + len(PROMPTS) + len(GENERATED)),
    ]
    for row in rows:
        seconds = [row.request_s, *(row.ttft_s[n] for n in PROMPTS), *(row.tpot_s[n] for n in GENERATED)]
        numbers = " | ".join(f"{s:.4g}" for s in seconds)
        size = f"{row.gpu_bytes / 1e9:.2f} GB"
        lines.append(f"| {row.model} | {row.share:.0%} | {row.engine} | {row.planner} | {size} | {numbers} |")
    return "\n".join(lines) + "\n"


def _claim_lines(claim: Claim, found: Mapping[tuple[str, float, str], Row], engines: Sequence[str]) -> list[str]:
    shares = sorted({share for model, share, _ in found if model == claim.model and claim.share in (None, share)})
    lines = []
    for share in shares:
        base = found[claim.model, share, claim.baseline].seconds(claim.metric)
        cells = []
        for name in engines:
            row = found.get((claim.model, share, name))
            cells.append(_cell(base, row.seconds(claim.metric)) if row else "-")
        what = f"{claim.words}{'' if claim.metric else ' (metric not stated; E2E shown)'}"
        lines.append(
            f"| {claim.model} | {share:.0%} | {what} | {claim.baseline} | +{claim.percent:g} % | {' | '.join(cells)} |"
        )
    return lines


def _cell(base: Mapping[int, float], ours: Mapping[int, float]) -> str:
    """The gain; for several prompts the best and the worst one, each with its length."""
    ratios = {n: base[n] / ours[n] for n in base}
    if len(ratios) == 1:
        return _gain(ratios[0])
    best, worst = max(ratios, key=lambda n: ratios[n]), min(ratios, key=lambda n: ratios[n])
    return f"{_gain(ratios[best])} ({best}), {_gain(ratios[worst])} ({worst})"


def _gain(ratio: float) -> str:
    return f"{100 * (ratio - 1):+.1f} / {100 * (1 - 1 / ratio):+.1f}"


if __name__ == "__main__":
    main()
