"""The two tables of the planner: how far its predictions are off, and whether its plan is ever slower than llama.cpp.

python bench/cells.py [--out FILE] [--devices CPU,RPC,Vulkan0] [--archs ...] [--budgets 40%,80%] [--depths 0,2048,8192]

A cell is a model, a device, a budget and a depth. In each one the planner makes its candidates: the chosen plan, those
of --also and the stock rivals (-ngl, llama.cpp's own --fit, the CPU) run interleaved in processes of their own, the
rivals on unpatched llama.cpp where it has the device. The machine is profiled once per model and device, just before.
One JSON line per cell and engine; --tables FILE.jsonl prints the tables of a recorded file instead. --rounds FILE.jsonl
compares the predictions of two commits whose runs took turns on a machine that drifts.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from oallama.bench import Engine, LoadParams, cpu_only, find_baseline_lib, fitted
from oallama.bench.machine import describe
from oallama.bench.planned import planned
from oallama.bench.script import arguments, note, numbers, read, record, words
from oallama.bench.sweep import Sweep, run_bench
from oallama.data.plan import HOST, PlacementPlan
from oallama.engine import runtime
from oallama.engine.load_settings import Settings
from oallama.engine.rpc import LocalRpcServer, share_processor
from oallama.errors import OallamaError
from oallama.loading import autoplan
from oallama.loading.autoplan import Choices
from oallama.modelmaker import make_model
from oallama.planning import Workload
from oallama.profiling.profiler import forget

# Larger than twice the last-level cache, as real models are: weights are timed cold.
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"file_type": "Q8_0", "n_embd": 2048, "n_ff": 5632, "n_layer": 14, "n_head": 16},
    "qwen2": {"file_type": "Q4_0", "n_embd": 2048, "n_ff": 7168, "n_layer": 20, "n_head": 16},
    "minicpm3": {"file_type": "Q8_0", "n_embd": 1920, "n_ff": 5120, "n_layer": 16, "n_head": 30},
    "qwen3moe": {"file_type": "Q8_0", "n_embd": 1280, "n_layer": 12, "n_ff_expert": 640},
}
# As large, of the narrow matrices of the shape "small": for a device as slow as Vulkan on lavapipe.
NARROW = {"llama": 72, "qwen2": 48, "minicpm3": 48, "qwen3moe": 24}
N_PROMPT, N_GENERATE = 128, 32
STOCK = ("layers", "fewer-layers", "fit")
# Read into memory, not mapped: where the kernel takes back pages of files that rest, a mapped model decodes slower
# after a while than when it was loaded, whatever the engine.
LOAD = LoadParams(load_mode="none")


def main() -> None:
    parser = arguments(__doc__, "cells")
    parser.add_argument("--devices", type=words, default="CPU,RPC")
    parser.add_argument("--archs", type=words, default=[*MODELS])
    parser.add_argument(
        "--budgets", type=words, default="40%,80%", help="of the model's bytes, weights + cache + buffers"
    )
    parser.add_argument("--depths", type=numbers, default="0,2048,8192")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--also", type=words, default=["exact"], help="planners measured beside the chosen plan and the stock rivals"
    )
    parser.add_argument("--threads", type=int, default=0, help="of the host; the RPC server always has all")
    parser.add_argument("--narrow", action="store_true", help="many narrow layers, for a device as slow as lavapipe")
    parser.add_argument("--reload", action="store_true", help="one engine in memory at a time, as in use")
    parser.add_argument("--tables", type=Path)
    parser.add_argument("--rounds", type=Path)
    options = parser.parse_args()
    if options.rounds:
        print(rounds(read(options.rounds)))
        return
    if options.tables:
        print(tables(read(options.tables)))
        return
    share_processor()
    record(measured(options), options.out, each={"machine": describe()}, quiet=True)


def measured(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for arch in options.archs:
        with tempfile.TemporaryDirectory() as folder:
            spec = dict(MODELS[arch])
            file_type = spec.pop("file_type")
            model = make_model(
                Path(folder) / f"{arch}.gguf",
                arch=arch,
                shape="small",
                file_type=file_type,
                overrides={"n_layer": NARROW[arch]} if options.narrow else spec,
            )
            for device in options.devices:
                for budget in options.budgets if device != HOST else [None]:
                    for depth in options.depths:
                        try:
                            yield cell(model, arch, device, budget, depth, options)
                        except OallamaError as error:
                            note(f"{arch} {device} {budget} {depth}: {error}")


_profiled: set[tuple[str, str]] = set()


def cell(
    model: Path, arch: str, device: str, budget: str | None, depth: int, options: argparse.Namespace
) -> dict[str, Any]:
    """One cell, measured."""
    n_ctx = -(-(depth + N_PROMPT + N_GENERATE + 1) // 256) * 256
    settings = Settings(n_ctx=n_ctx, n_threads=options.threads)
    name = _rpc_device() if device == "RPC" else device
    graph = autoplan.read_graph(model, settings)
    if (arch, device) not in _profiled:
        forget([name] if name != HOST else [], options.threads)
        _profiled.add((arch, device))
    choices = Choices(device=name, workload=Workload(N_PROMPT, N_GENERATE, depth), all_candidates=True)
    vram = None
    if budget is not None:
        whole = graph.weights_bytes + sum(_kv_bytes(graph, n_ctx))
        vram = int(whole * float(budget.rstrip("%")) / 100)
    found = autoplan.candidates(model, graph, vram, settings, choices)
    chosen = next(iter(found.plans))
    with ExitStack() as stack, tempfile.TemporaryDirectory() as states:
        engines = {}
        for planner, plan in _distinct(found.plans).items():
            if planner not in (chosen, *options.also, *STOCK):
                continue
            server = stack.enter_context(LocalRpcServer(register=False)) if device == "RPC" else None
            base = replace(LOAD, n_threads=options.threads, rpc_servers=(server.endpoint,) if server else ())
            engines[planner] = _stock(plan, base, device) if planner in STOCK else planned(
                plan, runtime.lib_dir(), base, name=planner
            )  # fmt: skip
        engines["llama.cpp CPU"] = cpu_only(replace(LOAD, n_ctx=settings.n_ctx, n_threads=settings.n_threads))
        sweep = Sweep(
            (N_PROMPT,),
            (depth,),
            (N_GENERATE + 1,),
            repeats=options.repeats,
            interleave="reload" if options.reload else "loaded",
            state_dir=states,
        )
        start = time.monotonic()
        results = run_bench(model, [replace(e, name=n) for n, e in engines.items()], sweep)
    line: dict[str, Any] = {
        "arch": arch, "device": device, "budget": budget, "vram": vram, "depth": depth, "n_ctx": n_ctx,
        "n_threads": options.threads or len(os.sched_getaffinity(0)),
        "n_prompt": N_PROMPT, "n_generate": N_GENERATE, "chosen": chosen,
        "failed": {n: str(e) for n, e in found.failed.items()}, "engines": {}, "seconds": time.monotonic() - start,
    }  # fmt: skip
    for result in results:
        plan = found.plans.get(result.engine)
        requests = [
            t + (N_GENERATE - 1) * (p or 0.0)
            for t, p in zip(result.values("ttft_s"), result.values("tpot_s"), strict=True)
        ]
        line["engines"][result.engine] = {
            "ttft_s": statistics.median(result.values("ttft_s")),
            "tpot_s": statistics.median(result.values("tpot_s")),
            "request_s": statistics.median(requests),
            "requests_s": requests,
            "predicted": _predicted(plan) if plan else None,
            "params": dict(plan.planner["params"]) if plan else None,
            "device_bytes": result.device_bytes(),
        }
    line["same_as"] = {n: k for n, k in _alike(found.plans).items() if n != k}
    print(f"{arch} {device} {budget} depth {depth}: chosen {chosen}, {_ratio(line):.3f}x of the best stock", flush=True)
    return line


def _predicted(plan: PlacementPlan) -> dict[str, float]:
    parts, (_, n_generate) = plan.predicted.parts, plan.predicted.workload
    return {
        "ttft_s": sum(parts["prefill"].values()),
        "tpot_s": sum(parts["decode"].values()) / (n_generate - 1),
        "request_s": plan.predicted.request_s,
    }


def _alike(plans: dict[str, PlacementPlan] | Any) -> dict[str, str]:
    """The first candidate with the same table, context and engine: equal plans are measured once."""
    seen: dict[tuple[str, str, bool], str] = {}
    result = {}
    for name, plan in plans.items():
        key = (plan.to_backend_map(), str((plan.context, plan.devices)), name in STOCK)
        result[name] = seen.setdefault(key, name)
    return result


def _distinct(plans: Any) -> dict[str, PlacementPlan]:
    alike = _alike(plans)
    return {name: plan for name, plan in plans.items() if alike[name] == name}


def _stock(plan: PlacementPlan, base: LoadParams, device: str) -> Engine:
    """Unpatched llama.cpp with a stock candidate's flags; Vulkan is in our build only, upstream's without a map."""
    params = plan.planner["params"]
    lib = runtime.lib_dir() if device.startswith("Vulkan") else find_baseline_lib()
    names = tuple(name for name in plan.devices if name != HOST)
    flags = replace(base, n_ctx=plan.context.n_ctx, devices=names)
    return fitted(flags, int(params["n_gpu_layers"]), params.get("overrides", ()), lib_dir=lib)


_server: list[LocalRpcServer] = []


def _rpc_device() -> str:
    if not _server:
        _server.append(LocalRpcServer())
    return _server[0].devices[0]


def _kv_bytes(graph: Any, n_ctx: int) -> list[int]:
    return [2 * n_ctx * s.n_head_kv * (s.head_dim_k + s.head_dim_v) if s else 0 for s in graph.attention]


WHERE = ("model", "device", "host threads", "budget", "depth")

# ---- tables --------------------------------------------------------------------------------------------------------


def _best_stock(line: dict[str, Any]) -> tuple[str, float]:
    """The fastest of llama.cpp's own ways; where no accelerator is used, its CPU."""
    rivals = {n: e["request_s"] for n, e in line["engines"].items() if n in STOCK}
    if not rivals:
        rivals = {"llama.cpp CPU": line["engines"]["llama.cpp CPU"]["request_s"]}
    return min(rivals.items(), key=lambda item: item[1])


def _chosen(line: dict[str, Any]) -> dict[str, Any]:
    return line["engines"][line["same_as"].get(line["chosen"], line["chosen"])]


def _ratio(line: dict[str, Any]) -> float:
    return _best_stock(line)[1] / _chosen(line)["request_s"]


def tables(lines: list[dict[str, Any]]) -> str:
    """Both tables as markdown."""
    return "\n".join([*_never_slower(lines), "", *_errors(lines)]) + "\n"


def _never_slower(lines: list[dict[str, Any]]) -> list[str]:
    head = (*WHERE, "chosen", "request s", "best stock", "request s", "ratio", "its CPU alone s")
    out = ["## Never slower", "", f"Request = TTFT of {N_PROMPT} tokens + {N_GENERATE - 1} x TPOT, medians of"]
    out[-1] += " interleaved rounds; above 1x the chosen plan is faster."
    out += ["", _row(head), _row(["---"] * len(head))]
    for line in lines:
        stock, seconds = _best_stock(line)
        own = _chosen(line)["request_s"]
        cpu = line["engines"]["llama.cpp CPU"]["request_s"]
        cells = (line["chosen"], f"{own:.3f}", stock, f"{seconds:.3f}", f"{_ratio(line):.3f}x", f"{cpu:.3f}")
        out.append(_row((*_where(line), *cells)))
    ratios = sorted(map(_ratio, lines))
    losing = sum(r < 0.98 for r in ratios)
    middle = statistics.median(ratios)
    out += [
        "",
        f"{len(ratios)} cells, {losing} below 0.98x; min {ratios[0]:.3f}x, median {middle:.3f}x, "
        f"max {ratios[-1]:.3f}x.",
    ]
    return out


def _errors(lines: list[dict[str, Any]]) -> list[str]:
    head = (*WHERE, "plan", "TTFT ms", "predicted", "error", "TPOT ms", "predicted", "error")
    out = ["## Prediction error", "", "Predicted against the measured median, in percent of it.", ""]
    out += [_row(head), _row(["---"] * len(head))]
    every: dict[str, list[float]] = {kind: [] for kind in ("TTFT", "TPOT", "chosen TTFT", "chosen TPOT")}
    for line in lines:
        for name, e in line["engines"].items():
            if not e["predicted"]:
                continue
            cells = []
            for kind in ("TTFT", "TPOT"):
                key = f"{kind.lower()}_s"
                error = 100 * (e["predicted"][key] / e[key] - 1)
                cells += [f"{1e3 * e[key]:.2f}", f"{1e3 * e['predicted'][key]:.2f}", f"{error:+.1f} %"]
                every[kind].append(abs(error))
                if e is _chosen(line):
                    every[f"chosen {kind}"].append(abs(error))
            out.append(_row((*_where(line), name, *cells)))
    out.append("")
    for kind, values in every.items():
        ordered = sorted(values)
        p90 = ordered[min(len(ordered) - 1, int(0.9 * len(ordered)))]
        middle = statistics.median(ordered)
        out.append(f"- {kind}: {len(values)} values, median {middle:.1f} %, p90 {p90:.1f} %, max {ordered[-1]:.1f} %")
    return out


def rounds(lines: list[dict[str, Any]]) -> str:
    """Mean errors by commit: of each prediction against the median of all measurements of that plan, of any commit.

    Plans are taken to be one where the cell, the planner, and the form of attention are. "own run" compares with the
    measurement right after it instead, which the drift of the machine is part of.
    """
    measured, found = defaultdict(list), defaultdict(list)
    for line in lines:
        for name, e in line["engines"].items():
            for kind in ("ttft_s", "tpot_s"):
                plan = (*_where(line), name, (e["params"] or {}).get("flash_attn"), kind)
                measured[plan].append(e[kind])
                if e["predicted"]:
                    found[line["device"], kind, line["machine"]["commit"][:7]].append((plan, e))
    head = ("device", "time", "commit", "predictions", "mean error, pooled", "own run", "signed, pooled")
    out = [_row(head), _row(["---"] * len(head))]
    for (device, kind, commit), some in sorted(found.items()):
        pooled = [100 * (e["predicted"][kind] / statistics.median(measured[plan]) - 1) for plan, e in some]
        own = [100 * abs(e["predicted"][kind] / e[kind] - 1) for _, e in some]
        means = (statistics.mean(map(abs, pooled)), statistics.mean(own))
        cells = (*(f"{m:.1f} %" for m in means), f"{statistics.mean(pooled):+.1f} %")
        out.append(_row((device, kind[:4].upper(), commit, str(len(some)), *cells)))
    return "\n".join(out)


def _where(line: dict[str, Any]) -> tuple[str, ...]:
    return line["arch"], line["device"], str(line["n_threads"]), line["budget"] or "-", str(line["depth"])


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    os.environ.setdefault("GGML_VK_VISIBLE_DEVICES", "0")
    main()
