"""The two tables of the planner: how far its predictions are off, and whether its plan is ever slower than llama.cpp.

python bench/cells.py [--out FILE] [--devices CPU,RPC,Vulkan0] [--archs ...] [--budgets 40%,80%] [--depths 0,2048,8192]

A cell is a model, a device, a budget and a depth. In each one the planner makes its candidates: the chosen plan, those
of --also (oato-paper: Algorithm 1 as published) and the stock rivals of --stock (-ngl, llama.cpp's own --fit, --n-cpu-*
of the first and of the last layers, the CPU) run interleaved in processes of their own, the rivals on unpatched
llama.cpp where it has the device. Every rival is planned and measured twice: with the form of attention of the chosen
plan, and with the other one, so that what placement gains is told from what the form does. The machine is profiled once
per model and device, just before its first cell. `drift` says how many times longer each device's heaviest products of
one token took before and after the cell than in that profile, which may be an hour old. One JSON line per cell;
--tables FILE.jsonl prints the tables of a recorded file instead. --rounds FILE.jsonl compares the predictions of two
commits whose runs took turns on a machine that drifts.

All cells, on a quiet machine: about six hours on two cores (the two calls append to one file):
  python bench/cells.py --reload --archs llama,qwen2,minicpm3,qwen3moe --devices CPU,RPC
  python bench/cells.py --reload --archs llama,qwen2,minicpm3,qwen3moe --devices RPC --threads 1 --depths 0,2048
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from cells_tables import CPU_ALONE, is_stock, rounds, summary, tables

from oallama.bench import Engine, LoadParams, cpu_only, ffn_on_cpu, find_baseline_lib, fitted
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
from oallama.planning import Space, Workload, make_plans
from oallama.profiling.drift import check_drift
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
STOCK = ("layers", "fewer-layers", "fit", "cpu-moe", "cpu-ffn", "cpu-moe-last", "cpu-ffn-last")
PAPER = "oato-paper"
# Read into memory, not mapped: where the kernel takes back pages of files that rest, a mapped model decodes slower
# after a while than when it was loaded, whatever the engine.
LOAD = LoadParams()


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
        "--also", type=words, default=["exact", "oato", PAPER], help="planners measured beside the chosen plan"
    )
    parser.add_argument("--stock", type=words, default=STOCK, help="stock rivals, in both forms of attention")
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
            model = written(arch, Path(folder), options.narrow)
            for device in options.devices:
                for budget in options.budgets if device != HOST else [None]:
                    for depth in options.depths:
                        try:
                            yield cell(model, arch, device, budget, depth, options)
                        except OallamaError as error:
                            note(f"{arch} {device} {budget} {depth}: {error}")


def written(arch: str, folder: Path, narrow: bool = False) -> Path:
    """The file of one of the MODELS."""
    spec = dict(MODELS[arch])
    file_type = spec.pop("file_type")
    overrides = {"n_layer": NARROW[arch]} if narrow else spec
    return make_model(folder / f"{arch}.gguf", arch=arch, shape="small", file_type=file_type, overrides=overrides)


_profiled: set[tuple[str, str]] = set()


def cell(
    model: Path, arch: str, device: str, budget: str | None, depth: int, options: argparse.Namespace
) -> dict[str, Any]:
    """One cell, measured."""
    n_ctx = -(-(depth + N_PROMPT + N_GENERATE + 1) // 256) * 256
    settings = Settings(n_ctx=n_ctx, n_threads=options.threads)
    n_threads = options.threads or len(os.sched_getaffinity(0))
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
    considered = autoplan.consider(model, graph, vram, settings, choices)
    found, space = considered.found, considered.space
    chosen = next(iter(found.plans))
    plans, failed = {chosen: found.plans[chosen]}, {n: str(e) for n, e in found.failed.items()}
    for planner in options.also:
        paper = replace(space, paper=True, _builders={}, _whole={})
        _add(plans, failed, planner, *((paper, "oato") if planner == PAPER else (space, planner)))
    forms = _forms(plans[chosen].context.flash_attn)
    for form in forms if budget is not None else ():
        if form != settings.flash_attn:
            asked = replace(settings, flash_attn=form)
            other = autoplan.consider(
                model, autoplan.read_graph(model, asked), vram, asked, replace(choices, planner="cpu")
            )
            # All plans of a cell are from the same times.
            space = replace(other.space, profile=considered.space.profile, _builders={}, _whole={})
        else:
            space = considered.space
        for planner in options.stock:
            _add(plans, failed, f"{planner} -fa {form}", space, planner)
    with ExitStack() as stack, tempfile.TemporaryDirectory() as states:
        engines = []
        for label, plan in _distinct(plans).items():
            server = stack.enter_context(LocalRpcServer(register=False)) if device == "RPC" else None
            base = replace(LOAD, n_threads=options.threads, rpc_servers=(server.endpoint,) if server else ())
            stock = is_stock(label)
            engine = _stock(plan, base, device, graph.n_layer) if stock else planned(plan, runtime.lib_dir(), base)
            engines.append(replace(engine, name=label))
        for form in forms:
            params = replace(LOAD, n_ctx=settings.n_ctx, n_threads=settings.n_threads, flash_attn=form)
            cpu = cpu_only(params, find_baseline_lib())
            engines.append(replace(cpu, name=f"{CPU_ALONE} -fa {form}"))
        sweep = Sweep(
            (N_PROMPT,),
            (depth,),
            (N_GENERATE + 1,),
            repeats=options.repeats,
            interleave="reload" if options.reload else "loaded",
            state_dir=states,
        )
        profile, devices = considered.space.profile, [*dict.fromkeys((HOST, name))]
        start, before = time.monotonic(), check_drift(profile, devices, n_threads)
        results = run_bench(model, engines, sweep)
        after = check_drift(profile, devices, n_threads)
    line: dict[str, Any] = {
        "arch": arch, "device": device, "budget": budget, "vram": vram, "depth": depth, "n_ctx": n_ctx,
        "n_threads": n_threads,
        "n_prompt": N_PROMPT, "n_generate": N_GENERATE, "chosen": chosen, "flash_attn": forms[0],
        "failed": failed, "engines": {}, "seconds": time.monotonic() - start,
        "drift": {device: [before[device], after[device]] for device in devices},
    }  # fmt: skip
    for result in results:
        plan = plans.get(result.engine)
        requests = [
            t + (N_GENERATE - 1) * (p or 0.0)
            for t, p in zip(result.values("ttft_s"), result.values("tpot_s"), strict=True)
        ]
        line["engines"][result.engine] = {
            "ttft_s": statistics.median(result.values("ttft_s")),
            "tpot_s": statistics.median(result.values("tpot_s")),
            "request_s": statistics.median(requests),
            "requests_s": requests,
            "flash_attn": result.params["flash_attn"],
            "predicted": _predicted(plan) if plan else None,
            "token_by_device": None if plan is None or is_stock(result.engine) else _token(considered.with_terms(plan)),
            "params": dict(plan.planner["params"]) if plan else None,
            "device_bytes": result.device_bytes(),
        }
    line["same_as"] = {n: k for n, k in _alike(plans).items() if n != k}
    print(f"{arch} {device} {budget} depth {depth}: {summary(line)}", flush=True)
    return line


def _forms(chosen: str) -> tuple[str, str]:
    """llama.cpp's -fa as the chosen plan has it, then the other one."""
    return chosen, "auto" if chosen == "off" else "off"


def _add(plans: dict[str, PlacementPlan], failed: dict[str, str], label: str, space: Space, planner: Any) -> None:
    """One plan more; why there is none, where it does not apply or does not fit."""
    if label in plans:
        return
    try:
        plans[label] = make_plans(space, planner).best
    except OallamaError as error:
        failed[label] = str(error)


def _predicted(plan: PlacementPlan) -> dict[str, float]:
    parts, (_, n_generate) = plan.predicted.parts, plan.predicted.workload
    return {
        "ttft_s": sum(parts["prefill"].values()),
        "tpot_s": sum(parts["decode"].values()) / (n_generate - 1),
        "request_s": plan.predicted.request_s,
    }


def _token(plan: PlacementPlan) -> dict[str, float]:
    """Predicted seconds of a token by device."""
    seconds = {device: 0.0 for device in plan.devices}
    for term, each in plan.predicted.terms["decode"].items():
        seconds[term.partition(" ")[0]] += each / (plan.predicted.workload[1] - 1)
    return seconds


def _alike(plans: dict[str, PlacementPlan] | Any) -> dict[str, str]:
    """The first candidate with the same table, context and engine: equal plans are measured once."""
    seen: dict[tuple[str, str, bool], str] = {}
    result = {}
    for name, plan in plans.items():
        key = (plan.to_backend_map(), str((plan.context, plan.devices)), is_stock(name))
        result[name] = seen.setdefault(key, name)
    return result


def _distinct(plans: Any) -> dict[str, PlacementPlan]:
    alike = _alike(plans)
    return {name: plan for name, plan in plans.items() if alike[name] == name}


def _stock(plan: PlacementPlan, base: LoadParams, device: str, n_layer: int) -> Engine:
    """Unpatched llama.cpp with a stock candidate's flags; Vulkan is in our build only, upstream's without a map."""
    name, params = plan.planner["name"], plan.planner["params"]
    lib = runtime.lib_dir() if device.startswith("Vulkan") else find_baseline_lib()
    names = tuple(name for name in plan.devices if name != HOST)
    flags = replace(base, n_ctx=plan.context.n_ctx, devices=names, flash_attn=plan.context.flash_attn)
    if "n" in params:
        return ffn_on_cpu(flags, name, int(params["n"]), n_layer, lib_dir=lib)
    return fitted(flags, int(params["n_gpu_layers"]), params.get("overrides", ()), lib_dir=lib)


_server: list[LocalRpcServer] = []


def _rpc_device() -> str:
    if not _server:
        _server.append(LocalRpcServer())
    return _server[0].devices[0]


def _kv_bytes(graph: Any, n_ctx: int) -> list[int]:
    return [2 * n_ctx * s.n_head_kv * (s.head_dim_k + s.head_dim_v) if s else 0 for s in graph.attention]


if __name__ == "__main__":
    os.environ.setdefault("GGML_VK_VISIBLE_DEVICES", "0")
    main()
