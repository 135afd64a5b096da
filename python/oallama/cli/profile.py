"""`oallama profile`: measure what a model needs on this machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from oallama.base.printing import print_json, seconds
from oallama.data.entries import OTHER, QUIET_CPUS, OperatorTime, OtherLoad
from oallama.data.profile import Profile as MachineProfile
from oallama.engine.load_settings import Settings
from oallama.engine.runtime import quiet
from oallama.errors import OallamaError
from oallama.loading import autoplan
from oallama.loading.autoplan import Choices
from oallama.planning import OperatorGraph
from oallama.profiling.datasheet import Datasheet, make_profile
from oallama.profiling.profiler import forget
from oallama.profiling.slowdowns import MEMORY_STALL
from oallama.views.style import table

from .groups import grouped
from .operators import show_operators
from .options import (
    Ctx,
    Device,
    Hardware,
    Json,
    Kernels,
    LocalRpc,
    Model,
    Rpc,
    Sizes,
    Threads,
    TypeK,
    TypeV,
    connect,
    settings,
)
from .routing import Job, Routing, Text, profile_routing
from .terminal import out, progress_bar, warn_if_busy


@dataclass(frozen=True)
class Accelerator:
    """The accelerator to measure."""

    device: Device = None
    rpc: Rpc = None
    local_rpc: LocalRpc = False


@dataclass(frozen=True)
class Loaded:
    """How the model is loaded."""

    ctx: Ctx = None
    type_k: TypeK = "f16"
    type_v: TypeV = "f16"
    threads: Threads = 0

    def settings(self) -> Settings:
        return settings(Sizes(self.ctx), Kernels(self.type_k, self.type_v, threads=self.threads))


@grouped
def profile(
    model: Model,
    text: Text = None,
    *,
    accelerator: Accelerator,
    loaded: Loaded,
    fresh: Annotated[bool, typer.Option("--fresh", help="Forget the cached times: measure all anew.")] = False,
    datasheet: Annotated[
        str | None,
        typer.Option(help="Measure nothing: compute the profile of the machine in this datasheet (a name or a file)."),
    ] = None,
    operators: Annotated[
        bool, typer.Option("--operators", help="Show each kind of operator: bytes, seconds, what a GB of it saves.")
    ] = False,
    in_place: Annotated[
        bool,
        typer.Option("--in-place", help="With --operators: load the model and show how far the times are off in it."),
    ] = False,
    routing: Routing,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the profile, with --routing the trace, to this file.")
    ] = None,
    json: Json = False,
) -> None:
    """Time a model's operators, its attention and the links, on the CPU and the accelerator.

    Only what the cache (~/.cache/oallama) lacks is measured; Ctrl-C keeps what was. With --routing, record which
    experts a mixture chooses instead.
    """
    routing.check(text)
    if routing.routing:
        others = {"--fresh": fresh, "--datasheet": datasheet, "--operators": operators, "--in-place": in_place}
        if given := [name for name, value in others.items() if value]:
            raise OallamaError(f"{given[0]} is about times; leave it out with --routing")
        hardware = Hardware(device=accelerator.device, rpc=accelerator.rpc, local_rpc=accelerator.local_rpc)
        kernels = Kernels(loaded.type_k, loaded.type_v, threads=loaded.threads)
        profile_routing(Job(model, text, hardware, Sizes(loaded.ctx), kernels, output, json), routing)
        return
    if in_place and (datasheet is not None or not operators):
        raise OallamaError("--in-place needs --operators, and times of this machine: leave out --datasheet")
    wanted = loaded.settings()
    if datasheet is not None:
        quiet()
        sheet = Datasheet.load(datasheet)
        graph = autoplan.read_graph(model, wanted)
        made = make_profile(graph, sheet, wanted.type_k, wanted.type_v)
        resolved = autoplan.resolve(wanted, graph.n_ctx_train, elsewhere=True)
    else:
        connection = connect(accelerator.rpc, accelerator.local_rpc, accelerator.device)
        chosen = connection.device or autoplan.find_accelerator()
        graph = autoplan.read_graph(model, wanted)
        resolved = autoplan.resolve(wanted, graph.n_ctx_train)
        warn_if_busy()
        if fresh:
            forget([chosen] if chosen else [], resolved.n_threads)
        with progress_bar("profiling") as report:
            made = autoplan.profile_for(graph, Choices(device=chosen), resolved, report)
    if output:
        made.save(output)
    if operators:
        show_operators(made, graph, resolved, model if in_place else None, json)
    elif json:
        print_json(asdict(made))
    else:
        out.print(profile_table(made, graph))
    if not json:
        _remarks(made, output)


def _remarks(made: MachineProfile, output: Path | None) -> None:
    if made.source != "measured":
        out.print(f"computed from a {made.source}, not measured")
    for remark in made.remarks([device.name for device in made.devices]):
        out.print(remark, markup=False)
    for load in made.loads:
        if said := _slowed_by(load):
            out.print(f"{load.device}, when it was last measured: {', '.join(said)}")
    if output:
        out.print(f"written to {output}", soft_wrap=True)


def _slowed_by(load: OtherLoad) -> list[str]:
    said = [f"other programs kept {load.cpus:.1f} CPUs busy"] if load.cpus > QUIET_CPUS else []
    if load.memory_stall > MEMORY_STALL:
        said.append(f"programs waited for memory {100 * load.memory_stall:.0f} % of the time")
    if load.throttled:
        said.append(f"heat or power limits slowed the CPUs {load.throttled} times")
    if load.frequency is not None:
        said.append(f"the CPUs' clocks ran at {100 * load.frequency:.0f} % of their highest")
    return said


def profile_table(measured: MachineProfile, graph: OperatorGraph, title: str = "profile") -> Table:
    """Per device: the speed of the model's largest weight in decode and prefill, the links, the cost of a change."""
    view = table(title)
    view.add_column("device", no_wrap=True)
    for column in ("operators", "decode GB/s", "prefill GFLOP/s", "to device GB/s", "latency", "change"):
        view.add_column(column, justify="right")
    nbytes = {(t.type, *t.ne[:2]): t.nbytes for t in graph.tensors}
    for info in measured.devices:
        times = [t for t in measured.operators if t.device == info.name and t.op != OTHER]
        links = [link for link in measured.links if link.device == info.name and link.direction == "h2d"]
        links.sort(key=lambda link: link.bytes)
        view.add_row(
            info.name,
            str(len(times)),
            _rate(times, 1, lambda t: nbytes.get((t.type, *t.ne[:2]), 0)),
            _rate(times, max((t.n_tokens for t in times), default=1), lambda t: 2 * t.ne[0] * t.ne[1] * t.n_tokens),
            f"{links[-1].bytes / links[-1].median_s / 1e9:.1f}" if links else "-",
            seconds(links[0].median_s) if links else "-",
            seconds(measured.switch_time(info.name)),
        )
    return view


def _rate(times: list[OperatorTime], n_tokens: int, amount: Callable[[OperatorTime], float]) -> str:
    """Of the dense operator that moves or computes most at this token count, in units of 1e9 a second.

    Plain or repacked, whichever is faster.
    """
    rows = [(amount(t), t.median_s) for t in times if t.n_tokens == n_tokens and t.op == "MUL_MAT"]
    if not rows:
        return "-"
    most = max(moved for moved, _ in rows)
    return f"{most / min(s for moved, s in rows if moved == most) / 1e9:.1f}"
