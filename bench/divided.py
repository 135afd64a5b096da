r"""Measures divided weights: that both sides compute at once, and TPOT over budgets against plans of whole weights.

python bench/divided.py twice --model FILE.gguf [--repeats N] [--out FILE.jsonl]
python bench/divided.py budgets --model FILE.gguf [--device NAME] [--budgets ..] [--out FILE.jsonl] [--plot FILE.png]
python bench/divided.py predicted --shape NAME --datasheet NAME [--budgets ..] [--out FILE.jsonl] [--plot FILE.png]

twice: TTFT and TPOT on one core, on two threads of one CPU device (what this machine's memory and cores give at
best), and on two CPU devices of one thread each (the engine's own and a loopback RPC server) that share every
feed-forward and the output matrix; of a mixture also with every second expert on each side. budgets: TPOT of plans of
the planners `exact` (whole weights), `divided` and `layers` (-ngl) for shares of the weights, on such a server beside
such a host, or on --device. predicted: the same planners for a published shape (Q4_K_M) on a datasheet's machine.
Runs are interleaved, the medians of rounds compared. Server and host have a core each. Writes the machine, then one
JSON line per measurement.

Two cores of one machine are equally fast. For a host that is slow beside its accelerator give this process a ggml-cpu
without vector instructions (the server keeps its own), for example of
    cmake -S . -B build/plain-x86 -Dpybind11_DIR=$(python -m pybind11 --cmakedir) -DGGML_NATIVE=OFF \
        -DGGML_{SSE42,AVX,AVX2,FMA,F16C,BMI2}=OFF -DOALLAMA_{VULKAN,MPI}=OFF
    cmake --build build/plain-x86 --target ggml-cpu
    LD_LIBRARY_PATH=build/plain-x86/bin python bench/divided.py budgets ..
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from oallama.bench.engines import Engine, LoadParams
from oallama.bench.machine import describe
from oallama.bench.maps import backend_map
from oallama.bench.planned import planned
from oallama.bench.script import arguments, progress, record, words
from oallama.bench.sweep import Sweep, run_bench
from oallama.data.operators import OUTPUT, OperatorGraph, TensorInfo
from oallama.data.plan import is_divided_by_columns
from oallama.engine import runtime
from oallama.engine.load_settings import Settings
from oallama.engine.rpc import LocalRpcServer
from oallama.errors import OallamaError
from oallama.loading import autoplan, start
from oallama.loading.autoplan import Choices
from oallama.modelmaker import make_sparse_model
from oallama.planning import Workload
from oallama.profiling.datasheet import Datasheet, make_profile
from oallama.views.style import COLOURS, MARKERS, save_figure

PLANNERS = ("exact", "divided", "layers")
SHARE = 50  # percent
STEP = 256  # a multiple of every block of quantised values
BUDGETS = [f"{percent}%" for percent in range(5, 101, 5)]
LIBRARIES = "LD_LIBRARY_PATH"


@contextmanager
def two_cores(names: tuple[str, ...], register: bool = False) -> Iterator[dict[str, LocalRpcServer]]:
    """An RPC server of one thread per name on one core; this process and what it starts then is on another.

    register: this process plans with the first one's device.
    """
    one, other, *_ = cpus = sorted(os.sched_getaffinity(0))
    libraries = os.environ.pop(LIBRARIES, None)
    with ExitStack() as stack:
        stack.callback(os.sched_setaffinity, 0, cpus)
        # What is started inherits its core: left to the system, a woken server begins on the core of who woke it.
        os.sched_setaffinity(0, {other})
        servers = {
            name: stack.enter_context(LocalRpcServer(threads=1, register=register and name == names[0]))
            for name in names
        }
        os.sched_setaffinity(0, {one})
        if libraries is not None:
            os.environ[LIBRARIES] = libraries
        yield servers


# ---- twice the processors ------------------------------------------------------------------------------------------


def halved(graph: OperatorGraph, device: str, by_experts: bool = False) -> str:
    """Feed-forwards and the output matrix on both sides, everything else on the device.

    by_experts: a mixture's feed-forwards by every second expert in place of rows and columns.
    """
    targets = {op.weight for op in graph.targets(1)}

    def place(tensor: TensorInfo) -> str | tuple[str, str]:
        if tensor.name not in targets or (".ffn_" not in tensor.name and tensor.name != OUTPUT) or is_router(tensor):
            return f"{device} resident"
        if by_experts and "_exps" in tensor.name:
            return "CPU host", f"{device} experts {','.join(map(str, range(0, tensor.ne[2], 2)))}"
        columns = is_divided_by_columns(tensor.name)
        count = tensor.ne[0 if columns else 1] * SHARE // 100 // STEP * STEP
        return "CPU host", f"{device} {'columns' if columns else 'rows'} {count}"

    return backend_map(graph, device, place)


def is_router(tensor: TensorInfo) -> bool:
    return ".ffn_gate_inp" in tensor.name


def twice(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    graph = autoplan.read_graph(args.model, Settings(n_ctx=256))
    common = LoadParams(flash_attn="on", use_extra_bufts=False)  # an RPC server has plain kernels only
    maps = {"divided": halved(graph, "RPC0")}
    if graph.has_experts:
        maps["by experts"] = halved(graph, "RPC0", by_experts=True)
    with two_cores(("divided",)) as servers:
        endpoint = servers["divided"].endpoint
        both = replace(common, n_gpu_layers=-1, n_threads=1, rpc_servers=(endpoint,), devices=("RPC0",))
        engines = [Engine("one core", runtime.lib_dir(), replace(common, n_threads=1, devices=()), baseline=True)]
        engines += [Engine(name, runtime.lib_dir(), both, backend_map=text) for name, text in maps.items()]
        sweep = Sweep(prompts=(128,), gens=(24,), interleave="reload", repeats=args.repeats)
        results = run_bench(args.model, engines, sweep, progress=progress)
    threads = Engine("two threads", runtime.lib_dir(), replace(common, n_threads=2, devices=()), baseline=True)
    results += run_bench(args.model, [threads], sweep, progress=progress)
    for metric in ("ttft_s", "tpot_s"):
        samples = {result.engine: result.values(metric) for result in results}
        medians = {name: statistics.median(values) for name, values in samples.items()}
        ratios = {name: medians["one core"] / seconds for name, seconds in medians.items()}
        yield {
            "what": "twice", "model": args.model.stem, "metric": metric, "ratio": ratios, "median_s": medians, **samples
        }  # fmt: skip


# ---- budgets -------------------------------------------------------------------------------------------------------


def budgets(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    if args.device:
        params = dict.fromkeys(PLANNERS, LoadParams(n_threads=args.threads))
        yield from at_budgets(args, args.device, params, "reload")  # together they may not fit
        return
    with two_cores(PLANNERS, register=True) as servers, tempfile.TemporaryDirectory() as cache:
        os.environ["XDG_CACHE_HOME"] = cache  # a profile of these cores and libraries, for nobody else
        params = {name: LoadParams(n_threads=1, rpc_servers=(s.endpoint,)) for name, s in servers.items()}
        yield from at_budgets(args, servers[PLANNERS[0]].devices[0], params, "loaded")


def at_budgets(
    args: argparse.Namespace, device: str, params: dict[str, LoadParams], interleave: str
) -> Iterator[dict[str, Any]]:
    settings = Settings(n_ctx=256, n_batch=32, n_ubatch=32, n_threads=params[PLANNERS[0]].n_threads)
    sweep = Sweep((4,), gens=(12,), repeats=args.repeats, interleave=interleave)
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in PLANNERS}
    for budget in args.budgets:
        line = {"what": "budgets", "model": args.model.stem, "device": device, "budget": budget}
        plans = {}
        for name in PLANNERS:
            choices = Choices(device=device, planner=name, workload=Workload(16, 128), streams=False)
            try:
                plans[name] = start.plan_model(args.model, budget, settings, choices)
            except OallamaError as error:
                yield {**line, "planner": name, "refused": str(error)}
        engines = [planned(plan, runtime.lib_dir(), params[name], name) for name, plan in plans.items()]
        for result in run_bench(args.model, engines, sweep) if engines else []:
            plan, values = plans[result.engine], result.values("tpot_s")
            found[result.engine].append((percent(budget), 1e3 * statistics.median(values)))
            yield {
                **line, "planner": result.engine, "tpot_s": statistics.median(values),
                "predicted_s": plan.predicted.tpot_s[min(plan.predicted.tpot_s)],
                "weights_bytes": plan.predicted.devices[device].weights, "params": dict(plan.planner["params"]),
                "host_libraries": os.environ.get(LIBRARIES), "samples": values,
            }  # fmt: skip
    if args.plot:
        draw(found, f"{args.model.stem}, {device}", "TPOT (ms)", args.plot)


def percent(budget: str) -> float:
    return float(budget.rstrip("%"))


# ---- a machine one does not have -----------------------------------------------------------------------------------


def predicted(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    sheet, found = Datasheet.load(args.datasheet), {name: [] for name in PLANNERS}
    settings = Settings(n_ctx=4096, flash_attn="on", n_threads=sheet.cpu.cores)
    with tempfile.TemporaryDirectory() as folder:
        path = make_sparse_model(Path(folder) / "model.gguf", shape=args.shape, file_type="Q4_K_M")
        graph = autoplan.read_graph(path, settings)
        profile = make_profile(graph, sheet)
        for budget, name in product(args.budgets, PLANNERS):
            choices = Choices(planner=name, profile=profile, elsewhere=True, workload=Workload(512, 128))
            line = {"what": "predicted", "shape": args.shape, "datasheet": args.datasheet, "budget": budget}
            try:
                plan = autoplan.plan_graph(path, graph, budget, settings, choices)
            except OallamaError as error:
                yield {**line, "planner": name, "refused": str(error)}
                continue
            times = plan.predicted
            found[name].append((percent(budget), 1e3 * times.tpot_s[512]))
            yield {
                **line, "planner": name, "request_s": times.request_s, "ttft_s": times.ttft_s[512],
                "tpot_s": times.tpot_s[512], "params": dict(plan.planner["params"]),
            }  # fmt: skip
    if args.plot:
        draw(found, f"{args.shape} Q4_K_M, {args.datasheet}", "predicted TPOT (ms)", args.plot)


def draw(found: dict[str, list[tuple[float, float]]], title: str, quantity: str, path: Path) -> None:
    """TPOT (ms) over the budget (percent of the weights) by planner."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for (name, points), colour, marker in zip(found.items(), COLOURS, MARKERS, strict=False):
        axes.plot(*zip(*points, strict=True), color=colour, marker=marker, markersize=4, label=name)
    axes.set(xlabel="budget (% of the weights)", ylabel=quantity, title=title, ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend(title="planner")
    save_figure(figure, path)


def main() -> None:
    parser = arguments(__doc__, "divided")
    parser.add_argument("what", choices=("twice", "budgets", "predicted"))
    parser.add_argument("--model", type=Path)
    parser.add_argument("--shape", default="qwq-32b")
    parser.add_argument("--datasheet", default="rtx4090-xeon4314")
    parser.add_argument("--budgets", type=words, default=BUDGETS)
    parser.add_argument("--device", help="of the budgets, in place of a loopback RPC server")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of the host beside --device")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    ways = {"twice": twice, "budgets": budgets, "predicted": predicted}
    record(ways[args.what](args), args.out, head={"machine": describe()})


if __name__ == "__main__":
    main()
