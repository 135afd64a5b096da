"""llama-cpp-python's wheels against ours, prompt and answer, on the CPU alone and with half of the model on a device.

python bench/their_wheel.py [--out FILE.jsonl] [--layers 8] [--type Q4_K_M] [--prompt 512] [--generate 32] [--rounds 5]

Run it with the installed wheel, and after scripts/baseline.sh wheel and scripts/baseline.sh cuda-wheel: unpatched
llama.cpp of the same pin as llama-cpp-python's own workflows build it. "wheel" is its CPU wheel (no AVX-512), in both
forms of attention. "cuda-wheel" is the CPU part of its CUDA wheel (AVX, but no AVX2, FMA or F16C). The device is a
loopback RPC server of ours for all. Ours is measured twice: as llama.cpp, without a plan, and with one.

The model has LLaMA-8B's layers, some of them, and random weights. One JSON line per setting: medians of TTFT, TPOT and
the request's seconds, and how many times faster ours is than the best of theirs, with intervals.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from oallama.bench import Engine, Result, Sweep, run_bench
from oallama.bench.machine import REPOSITORY, describe
from oallama.bench.rivals import Rivals
from oallama.bench.script import arguments, note, record
from oallama.bench.some_layers import made
from oallama.bench.stats import speedup
from oallama.data.workload import Workload
from oallama.doctor.installed import cpu_module
from oallama.engine import runtime
from oallama.engine.load_settings import Settings
from oallama.engine.rpc import LocalRpcServer, share_processor
from oallama.errors import OallamaError
from oallama.loading import autoplan
from oallama.loading.autoplan import Choices
from oallama.loading.stock_plans import stock_plans

THEIRS = ("wheel", "cuda-wheel")
METRICS = ("ttft_s", "tpot_s", "e2e_s")
HALF = "50%"


def main() -> None:
    parser = arguments(__doc__, "their-wheel")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--type", default="Q4_K_M")
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--generate", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    share_processor()
    runtime.quiet()
    record(measured(options), options.out, each={"machine": describe()})


def measured(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    libs = {name: REPOSITORY / "build" / f"baseline-{name}" / "bin" for name in THEIRS}
    for name, lib in libs.items():
        if not lib.is_dir():
            raise OallamaError(f"no {lib}; first: scripts/baseline.sh {name}")
    settings = Settings(n_ctx=options.prompt + options.generate)
    for _, model in made([f"llama3-8b:{options.type}"], options.layers):
        for setting in ("CPU", HALF):
            with ExitStack() as stack:
                engines = _engines(model, setting, settings, options, libs, stack)
                sweep = Sweep(prompts=(options.prompt,), gens=(options.generate,), repeats=options.rounds)
                results = run_bench(model, engines, sweep, lambda done, total, what: note(f"{done}/{total} {what}"))
            yield {
                "setting": setting,
                "layers": options.layers,
                "type": options.type,
                "prompt": options.prompt,
                "generate": options.generate,
                "rounds": options.rounds,
                "cpu_module": cpu_module() or "linked",
                **_compared(results),
            }


def _engines(
    model: Path,
    setting: str,
    settings: Settings,
    options: argparse.Namespace,
    libs: dict[str, Path],
    stack: ExitStack,
) -> list[Engine]:
    """Of each of their builds what llama.cpp has for the setting; ours the same without a plan, and the plan."""
    graph = autoplan.read_graph(model, settings)
    wanted = autoplan.resolve(settings, graph.n_ctx_train)
    budget, device = None, "CPU"
    if setting == HALF:
        budget, device = HALF, stack.enter_context(LocalRpcServer()).devices[0]
    choices = Choices(device=device, workload=Workload(options.prompt, options.generate))
    plan = autoplan.plan_graph(model, graph, budget, wanted, choices)
    if budget:
        rivals = Rivals(plan, stock_plans(model, graph, plan, budget, wanted, choices), setting)
    else:
        rivals = Rivals(plan, {}, setting, on_cpu=True)
    engines = rivals.engines(wanted, (), bool(budget), stack, everything=False)
    ours = [engine for engine in engines if engine.backend_map is not None]
    stock = [engine for engine in engines if engine.backend_map is None and (engine.params.devices or not budget)]

    def on(lib: Path, group: str, engine: Engine) -> Engine:
        """What an engine does, by another library; each has a device of its own."""
        params = engine.params
        if params.rpc_servers:
            params = replace(params, rpc_servers=(stack.enter_context(LocalRpcServer(register=False)).endpoint,))
        name = f"{group}: {engine.placement} -fa {params.flash_attn}"
        return replace(engine, name=name, lib_dir=lib, params=params, baseline=False)

    groups = {**libs, "ours without a plan": runtime.lib_dir()}
    if budget:  # the CPU alone comes in both forms of attention already
        stock = [replace(e, params=replace(e.params, flash_attn=form)) for e in stock for form in ("on", "off")]
    copies = [on(lib, group, engine) for group, lib in groups.items() for engine in stock]
    return [*copies, *(replace(engine, name="ours", baseline=True) for engine in ours)]


def _compared(results: list[Result]) -> dict[str, Any]:
    """Medians by engine, and ours beside the best of each of their wheels by the whole request."""
    found: dict[str, Any] = {"engines": {}, "times": {}}
    for result in results:
        medians = {metric: result.summary(metric) for metric in METRICS}
        found["engines"][result.engine] = {m: round(s.p50, 5) for m, s in medians.items() if s}
    (ours,) = (result for result in results if result.engine == "ours")
    for group in (*THEIRS, "ours without a plan"):
        of_group = [result for result in results if result.engine.startswith(f"{group}: ") and result.samples]
        best = min(of_group, key=lambda result: result.summary("e2e_s").p50)  # type: ignore[union-attr]
        ratios = {metric: speedup(best.values(metric), ours.values(metric)) for metric in METRICS}
        found["times"][group] = {"best": best.engine, **{m: r.to_json() for m, r in ratios.items() if r}}
    return found


if __name__ == "__main__":
    main()
