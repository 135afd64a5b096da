"""A plan against unpatched llama.cpp at the same device bytes: the engines of one measured comparison."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Group
from rich.text import Text

from oallama.base.printing import say, seconds
from oallama.bench import (
    Engine,
    LoadParams,
    Result,
    all_on_device,
    compare,
    cpu_only,
    find_baseline_lib,
    first_prompts,
    fitted,
    layer_split,
)
from oallama.bench.planned import planned
from oallama.data.plan import HOST, PlacementPlan
from oallama.engine import engine, runtime
from oallama.engine.engine import Settings
from oallama.engine.rpc import LocalRpcServer
from oallama.errors import OallamaError
from oallama.loading import autoplan
from oallama.loading.autoplan import Choices, Progress
from oallama.planning import OperatorGraph, format_bytes
from oallama.views.style import table

# Drivers and library workspaces take their part beside the buffers.
_SHARE_OF_FREE = 0.9


@dataclass(frozen=True)
class Rivals:
    """A plan, and stock llama.cpp's own placements in the same device bytes: "layers", perhaps "fit"; or none."""

    plan: PlacementPlan
    stock: Mapping[str, PlacementPlan]
    label: str = ""

    def engines(
        self, settings: Settings, endpoints: tuple[str, ...], local_rpc: bool, stack: ExitStack, everything: bool = True
    ) -> list[Engine]:
        """The layer split, --fit, the plan and the CPU alone; with `everything` also all on the device.

        Stock engines run in the context that was asked for, the plan in its own. endpoints: RPC servers of the user,
        shared by all engines. local_rpc: each engine gets a loopback server of its own, which lives as long as `stack`.
        """

        def params(plan: PlacementPlan) -> LoadParams:
            servers = endpoints
            if local_rpc:
                servers = (*endpoints, stack.enter_context(LocalRpcServer(register=False)).endpoint)
            return LoadParams(
                n_ctx=plan.context.n_ctx,
                n_batch=plan.context.n_batch,
                n_ubatch=plan.context.n_ubatch,
                n_threads=settings.n_threads,
                flash_attn=plan.context.flash_attn,
                type_k=plan.context.type_k,
                type_v=plan.context.type_v,
                rpc_servers=servers,
                devices=_accelerators(plan),
            )

        label = f"plan {self.label or self.plan.hash[:8]}"
        ours = planned(self.plan, runtime.lib_dir(), params(self.plan), placement=label)
        if not self.stock:
            return [ours]
        lib, layers = find_baseline_lib(), self.stock["layers"]
        engines = [layer_split(params(layers), _n_gpu_layers(layers), _device_bytes(layers), lib)]
        if fit := self.stock.get("fit"):
            overrides = fit.planner["params"]["overrides"]
            engines.append(fitted(params(fit), _n_gpu_layers(fit), overrides, _device_bytes(fit), lib))
        engines += [ours, cpu_only(params(layers), lib)]
        return [*engines, all_on_device(params(layers), lib)] if everything else engines


def stock_plans(
    path: Path,
    graph: OperatorGraph,
    plan: PlacementPlan,
    budget: str,
    settings: Settings,
    choices: Choices,
    progress: Progress | None = None,
) -> dict[str, PlacementPlan]:
    """llama.cpp's layer split and its --fit in the device bytes of `plan`'s budget.

    `budget`: what to take when the plan uses the CPU alone, which has none. --fit is left out where it does the same or
    fails. `progress` hears of what the profile lacks and is measured. Raises OallamaError where no layer split fits.
    """
    own = next(iter(plan.budgets.values()), budget)
    if own != "auto":
        choices = replace(choices, margin=None)
    layers = autoplan.plan_graph(path, graph, own, settings, replace(choices, planner="layers"), progress)
    try:
        total = next(iter(layers.budgets.values()))
        fit = autoplan.plan_graph(path, graph, total, settings, replace(choices, planner="fit", margin=None))
    except OallamaError as error:
        say(f"llama.cpp's --fit is left out: {error}")
        return {"layers": layers}
    if fit.to_backend_map() == layers.to_backend_map():
        say(f"llama.cpp's --fit does the same as its layer split ({_n_gpu_layers(layers)} layers)")
        return {"layers": layers}
    return {"layers": layers, "fit": fit}


def _accelerators(plan: PlacementPlan) -> tuple[str, ...]:
    return tuple(name for name in plan.devices if name != HOST)


def _n_gpu_layers(plan: PlacementPlan) -> int:
    return int(plan.planner["params"]["n_gpu_layers"])


def _device_bytes(plan: PlacementPlan) -> dict[str, int]:
    return {name: plan.predicted.devices[name].buffers for name in _accelerators(plan)}


def interleave_for(asked: str, engines: Sequence[Engine], plan: PlacementPlan) -> str:
    """The way to interleave: "reload" instead of "loaded" where the device cannot hold all engines at once."""
    name = plan.devices[0]
    if asked != "loaded" or name == HOST:
        return asked
    whole = sum(tensor.nbytes for tensor in plan.tensors.values())
    used = [e.predicted_bytes.get(name, 0) if e.predicted_bytes else whole for e in engines if e.params.devices]
    free = engine.device(name).memory_free
    if sum(used) <= free * _SHARE_OF_FREE:
        return asked
    say(f"{name} cannot hold {len(used)} engines at once ({format_bytes(free)} are free): they take turns")
    return "reload"


def results_table(results: Sequence[Result]) -> Group:
    """Medians that fit 80 columns; the reports on disk have the spread and everything else."""
    view = table()
    view.add_column("engine")
    view.add_column("test", no_wrap=True)
    for name in ("TTFT", "TPOT", "device MiB", "vs llama.cpp"):
        view.add_column(name, justify="right", no_wrap=True)
    for result in results:
        view.add_row(*_row(result, results))
    text = "vs llama.cpp: TTFT / TPOT against its own layer split in the same device bytes; above 1x is faster"
    failed = {f"{r.engine} was left out: {r.error}" for r in results if r.error}
    return Group(view, *(Text(line, style="dim") for line in (text, *first_prompts(results), *sorted(failed))))


def _row(result: Result, results: Sequence[Result]) -> tuple[str, ...]:
    ttft, tpot = result.summary("ttft_s"), result.summary("tpot_s")
    versus = compare(result, results)
    used = result.device_bytes()
    ratios = [f"{ratio.value:.2f}x" if ratio else "-" for ratio in (versus.ttft, versus.tpot)] if versus else []
    return (
        result.engine,
        f"{result.cell.prompt}+{result.cell.gen}" + (f" @ {result.cell.depth}" if result.cell.depth else ""),
        seconds(ttft.p50 if ttft else None),
        seconds(tpot.p50 if tpot else None),
        "-" if used is None else f"{used / 2**20:.1f}",
        "baseline" if result.baseline else " / ".join(ratios) or "-",
    )
