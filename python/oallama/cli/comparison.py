"""A plan against unpatched llama.cpp at the same device bytes: the engines of one measured comparison."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from rich.console import Group
from rich.text import Text

from oallama import engine, runtime
from oallama.bench import Engine, LoadParams, Result, all_on_device, compare, cpu_only, find_baseline_lib, layer_split
from oallama.bench.planned import planned
from oallama.engine import Settings
from oallama.plan import HOST, PlacementPlan
from oallama.planning import format_bytes
from oallama.rpc import LocalRpcServer

from .terminal import say, seconds, table

# Drivers and library workspaces take their part beside the buffers.
_SHARE_OF_FREE = 0.9


@dataclass(frozen=True)
class Rivals:
    """A plan and stock llama.cpp's own placement under the same budget (planner "layers"); None: no baselines."""

    plan: PlacementPlan
    layers: PlacementPlan | None
    label: str = ""

    def engines(
        self, settings: Settings, endpoints: tuple[str, ...], local_rpc: bool, stack: ExitStack, everything: bool = True
    ) -> list[Engine]:
        """The layer split, the plan and the CPU alone; with `everything` also all on the device.

        endpoints: RPC servers of the user, shared by all engines. local_rpc: each engine gets a loopback server of its
        own, which lives as long as `stack`.
        """

        def params() -> LoadParams:
            servers = endpoints
            if local_rpc:
                server = stack.enter_context(LocalRpcServer(threads=settings.n_threads, register=False))
                servers = (*endpoints, server.endpoint)
            context = self.plan.context
            return LoadParams(
                n_ctx=context.n_ctx,
                n_batch=context.n_batch,
                n_ubatch=context.n_ubatch,
                n_threads=settings.n_threads,
                flash_attn=context.flash_attn,
                type_k=context.type_k,
                type_v=context.type_v,
                rpc_servers=servers,
                devices=tuple(name for name in self.plan.devices if name != HOST),
            )

        ours = planned(self.plan, runtime.lib_dir(), params(), placement=f"plan {self.label or self.plan.hash[:8]}")
        if self.layers is None:
            return [ours]
        lib = find_baseline_lib()
        n_gpu_layers = int(self.layers.planner["params"].get("n_gpu_layers", 0))
        predicted = {name: m.total for name, m in self.layers.predicted.devices.items() if name != HOST}
        rivals = [layer_split(params(), n_gpu_layers, predicted, lib), ours, cpu_only(params(), lib)]
        return [*rivals, all_on_device(params(), lib)] if everything else rivals


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
    return Group(view, *(Text(line, style="dim") for line in (text, *sorted(failed))))


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
