"""A model larger than its budget at depth, predicted for a datasheet's machine: plans by kernels of attention.

python bench/deep_predicted.py [--shape qwq-32b] [--file-type Q4_K_M] [--datasheet rtx4090-xeon4314] [--vram 16GiB]
    [--depths 8192,16384,32768] [--n-prompt 512] [--n-generate 128] [--out FILE.jsonl]
python bench/deep_predicted.py --tables FILE.jsonl

Nothing is measured. Attention on the CPU is priced at the speed of memory ("memory": no kernel reached it), by
upstream's kernels ("upstream": --no-own-attention) and by the faster of upstream's and ours ("ours"). One JSON line per
price, depth and planner. "fit" is llama.cpp's own --fit, with -fa auto and with -fa off. --tables prints the lines.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from oallama.bench.machine import describe
from oallama.bench.script import arguments, note, numbers, read, record
from oallama.data.entries import padded_rows
from oallama.data.plan import HOST, PlacementPlan
from oallama.engine.load_settings import Settings
from oallama.errors import OallamaError
from oallama.loading import autoplan
from oallama.loading.autoplan import Choices
from oallama.modelmaker import make_sparse_model
from oallama.planning import Workload
from oallama.profiling.cpu_attention import AttentionEfficiencies, Cell
from oallama.profiling.datasheet import Datasheet, make_profile

PLANNERS = ("cpu", "fit", "exact", "divided", "auto")
PRICES = {"memory": False, "upstream": False, "ours": True}  # by kernels: whether ours are among them
FA_OFF = "fit, -fa off"
# How attention was priced before anything was measured: K and V read at the speed of memory, products at half the peak.
MEMORY = AttentionEfficiencies("memory", "", "no machine", (Cell("ggml", True, "f16", 1, 1, 128, 1, 1, 1.0, 0.5),))


def main() -> None:
    parser = arguments(__doc__, "deep-predicted")
    parser.add_argument("--shape", default="qwq-32b")
    parser.add_argument("--file-type", default="Q4_K_M")
    parser.add_argument("--datasheet", default="rtx4090-xeon4314")
    parser.add_argument("--vram", default="16GiB")
    parser.add_argument("--depths", type=numbers, default=(8192, 16384, 32768))
    parser.add_argument("--n-prompt", type=int, default=512)
    parser.add_argument("--n-generate", type=int, default=128)
    parser.add_argument("--tables", type=Path)
    options = parser.parse_args()
    if options.tables:
        print(table(read(options.tables)))
        return
    record(predicted(options), options.out, each={"machine": describe()})


def predicted(options: Any) -> Iterator[dict[str, Any]]:
    sheet = Datasheet.load(options.datasheet)
    at_memory_speed = replace(sheet, cpu=replace(sheet.cpu, attention=MEMORY))
    with tempfile.TemporaryDirectory() as folder:
        path = make_sparse_model(Path(folder) / "model.gguf", shape=options.shape, file_type=options.file_type)
        for depth in options.depths:
            workload = Workload(options.n_prompt, options.n_generate, depth)
            n_ctx = padded_rows(depth + options.n_prompt + options.n_generate)
            settings = Settings(n_ctx=n_ctx, n_threads=sheet.cpu.cores)
            graph = autoplan.read_graph(path, settings)
            for price, own in PRICES.items():
                note(f"{price}, depth {depth}")
                priced = at_memory_speed if price == "memory" else sheet
                profile = make_profile(graph, priced)
                choices = Choices(
                    profile=profile, elsewhere=True, workload=workload, own_attention=own, all_candidates=True
                )
                line = {"what": "predicted", "shape": options.shape, "file_type": options.file_type}
                line |= {"datasheet": options.datasheet, "attention": priced.cpu.attention.source, "price": price}
                line |= {"vram": options.vram, "n_ctx": n_ctx, "depth": depth}
                for name, plan in plans(path, options.vram, settings, choices).items():
                    yield {**line, "planner": name, **described(plan, workload)}


def plans(path: Path, vram: str, settings: Settings, choices: Choices) -> dict[str, PlacementPlan | str]:
    """By planner; the reason where there is no plan."""
    graph = autoplan.read_graph(path, settings)
    found = autoplan.candidates(path, graph, vram, settings, choices)
    made: dict[str, PlacementPlan | str] = {"auto": found.best}
    made |= {name: found.plans.get(name) or str(found.failed.get(name)) for name in PLANNERS if name != "auto"}
    unfused = replace(settings, flash_attn="off")
    try:
        graph = autoplan.read_graph(path, unfused)
        made[FA_OFF] = autoplan.plan_graph(path, graph, vram, unfused, replace(choices, planner="fit"))
    except OallamaError as error:
        made[FA_OFF] = str(error)
    return made


def described(plan: PlacementPlan | str, workload: Workload) -> dict[str, Any]:
    if isinstance(plan, str):
        return {"refused": plan}
    context, times = plan.context, plan.predicted
    on_cards = [memory for name, memory in times.devices.items() if name != HOST]
    tpot_s = times.tpot_s[workload.middle]
    return {
        "chosen": plan.planner["name"], "params": dict(plan.planner["params"]), "flash_attn": context.flash_attn,
        "kernels": context.attention, "n_ubatch": context.n_ubatch, "layers_on_host": plan.layers[:-1].count(HOST),
        "weights": sum(m.weights for m in on_cards), "kv": sum(m.kv for m in on_cards),
        "compute": sum(m.compute for m in on_cards),
        "request_s": times.request_s, "ttft_s": times.request_s - (workload.n_generate - 1) * tpot_s,
        "tpot_s": tpot_s, "parts": {stage: dict(causes) for stage, causes in times.parts.items()},
    }  # fmt: skip


def table(lines: list[dict[str, Any]]) -> str:
    """Markdown: per price and depth the plans' seconds, and how many times faster they are than --fit's better form."""
    rows = [
        "| VRAM | kernels | depth | plan | form | layers' KV on the host | TTFT | TPOT | request | x `--fit` |",
        "|---|---|--:|---|---|--:|--:|--:|--:|--:|",
    ]
    for line in lines:
        case = [other for other in lines if all(other[key] == line[key] for key in ("vram", "price", "depth"))]
        fits = [other["request_s"] for other in case if other["planner"].startswith("fit") and "request_s" in other]
        rows.append(_row(line, min(fits, default=None)))
    return "\n".join(rows)


def _row(line: dict[str, Any], fit_s: float | None) -> str:
    start = f"| {line['vram']} | {line['price']} | {line['depth']} | {line['planner']} |"
    if "refused" in line:
        return f"{start} - | - | - | - | - | - |"
    form = "unfused" if line["flash_attn"] == "off" else {"ggml": "fused"}.get(line["kernels"], "ours")
    gain = f"{fit_s / line['request_s']:.2f}x" if fit_s else "-"
    seconds = f"{line['ttft_s']:.2f} s | {1e3 * line['tpot_s']:.1f} ms | {line['request_s']:.1f} s"
    return f"{start} {form} | {line['layers_on_host']} | {seconds} | {gain} |"


if __name__ == "__main__":
    main()
