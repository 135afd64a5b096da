"""`oallama serve`: llama.cpp's own server, built from the patched source, obeying a plan."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer

from oallama.base.children import run_server
from oallama.base.printing import say
from oallama.data.plan import HOST, PlacementPlan
from oallama.engine import runtime
from oallama.engine.engine import Settings
from oallama.errors import OallamaError
from oallama.loading import autoplan
from oallama.loading.autoplan import Choices
from oallama.profiling.tuner import tuned_variable
from oallama.serving.serve_limits import Limits

from .options import (
    Batch,
    Ctx,
    Device,
    FlashAttn,
    LocalRpc,
    Margin,
    Plan,
    Profile,
    Rpc,
    Threads,
    TypeK,
    TypeV,
    Ubatch,
    Vram,
    connect,
    settings,
)
from .terminal import progress_bar
from .woven import Weaving, serve_woven

MAP_VARIABLE = "OALLAMA_BACKEND_MAP"


def serve(
    context: typer.Context,
    model: Annotated[Path | None, typer.Argument(help="GGUF file.", show_default=False)] = None,
    hot: Annotated[Path | None, typer.Option(help="In place of MODEL: the model with the most requests.")] = None,
    cold: Annotated[
        list[Path] | None, typer.Option(help="A model with few, whose process computes for the hot one; repeatable.")
    ] = None,
    guests: Annotated[
        int | None, typer.Option(min=0, help="Sequences of the hot model in cold ones' memory; default: --parallel.")
    ] = None,
    lend: Annotated[str | None, typer.Option(help='Memory of each cold process for guests, like "2GiB".')] = None,
    weave: Annotated[Path | None, typer.Option(help="Plan file of `oallama weave plan -o`.")] = None,
    deadline: Annotated[float, typer.Option(min=0.001, help="Seconds after which a guest's attention is lost.")] = 0.1,
    plan: Plan = None,
    vram: Vram = None,
    margin: Margin = None,
    profile: Profile = None,
    device: Device = None,
    rpc: Rpc = None,
    local_rpc: LocalRpc = False,
    ctx: Ctx = None,
    batch: Batch = None,
    ubatch: Ubatch = None,
    parallel: Annotated[int | None, typer.Option(min=1, help="Requests served at once, in a shared context.")] = None,
    type_k: TypeK = "f16",
    type_v: TypeV = "f16",
    flash_attn: FlashAttn = "auto",
    threads: Threads = 0,
    queue: Annotated[
        int, typer.Option(min=0, help="Requests of a model that may wait; more get 503 and Retry-After.")
    ] = Limits.queue,
    drain: Annotated[
        float, typer.Option(min=0, help="Seconds that requests have to come to an end before the server does.")
    ] = Limits.drain_s,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = 8080,
) -> None:
    """Serve the OpenAI API with llama-server; arguments after -- go to it unchanged.

    With --hot and --cold: several models by name, each in a process of its own; on the CPU, unless --device says
    "hot=CUDA0,cold=CUDA1", or one device for all.
    """
    limits = Limits(queue, drain)
    if hot is not None:
        of_one = {"--plan": plan, "--vram": vram, "--profile": profile, "--rpc": rpc, "--local-rpc": local_rpc}
        given = [name for name, value in of_one.items() if value]
        if model is not None or given:
            what = " and ".join(["MODEL"] * (model is not None) + given)
            raise OallamaError(f"--hot takes the place of MODEL and of what is for one model; leave out {what}")
        weaving = Weaving(hot, cold or [], limits, guests, lend, deadline, weave, device, margin)
        form = "on" if flash_attn == "auto" else flash_attn
        of_all = settings(ctx, batch, ubatch, type_k, type_v, form, threads, parallel or 4)
        raise typer.Exit(serve_woven(weaving, of_all, host, port, context.args))
    if model is None or cold:
        raise OallamaError("give MODEL, or --hot MODEL with --cold MODEL")
    if lend is not None or guests is not None or weave is not None:
        raise OallamaError("--guests, --lend and --weave are for --hot MODEL with --cold MODEL; leave them out")
    connection = connect(rpc, local_rpc, device)
    made = wanted = None
    chosen = connection.device or autoplan.find_accelerator()
    if plan:
        autoplan.refuse_margin(margin)
        made = autoplan.load_plan(plan)
        wanted = _planned_settings(made, ctx, batch, ubatch, parallel, threads)
        autoplan.check_plan(made, model, wanted)
    else:
        wanted = settings(ctx, batch, ubatch, type_k, type_v, flash_attn, threads, parallel or 1)
        if vram or chosen not in (None, HOST):
            with progress_bar("profiling") as report:
                choices = Choices(device=chosen, profile=profile, margin=margin)
                made = autoplan.plan_model(model, vram, wanted, choices, report)
        else:
            autoplan.refuse_margin(margin, "no accelerator is used")
    wanted = autoplan.resolve(wanted, autoplan.read_graph(model, wanted).n_ctx_train)
    command = server_command(model, wanted, made, connection.endpoints)
    command += ["--host", host, "--port", str(port), *context.args]
    where = f"by plan {made.hash[:8]}" if made else "on the CPU alone"
    say(f"serving {model.name} {where} on http://{host}:{port} (OpenAI API under /v1)")
    with table_file(made) as environment:
        code = run_server(command, environment | limits.of_server(wanted.n_seq_max))
    raise typer.Exit(code)


def _planned_settings(
    plan: PlacementPlan, ctx: int | None, batch: int | None, ubatch: int | None, parallel: int | None, threads: int
) -> Settings:
    """The plan's context settings with what was given instead; check_plan says whether that fits."""
    planned = plan.context
    return replace(
        Settings(**asdict(planned), n_threads=threads),
        n_ctx=planned.n_ctx if ctx is None else ctx,
        n_batch=batch or planned.n_batch,
        n_ubatch=ubatch or planned.n_ubatch,
        n_seq_max=parallel or planned.n_seq_max,
    )


def server_command(
    model: Path, settings: Settings, plan: PlacementPlan | None, endpoints: Sequence[str] = ()
) -> list[str]:
    """The command line of llama-server that loads the model as planned; without a plan on the CPU alone."""
    devices = [name for name in plan.devices if name != HOST] if plan else []
    command = [str(runtime.program("llama-server")), "-m", str(model), "-fit", "off", "-no-kvu"]
    command += ["--rpc", ",".join(endpoints)] if endpoints else []  # before --device, which names them
    command += ["-c", str(settings.n_ctx), "-b", str(settings.n_batch), "-ub", str(settings.n_ubatch)]
    command += ["-np", str(settings.n_seq_max), "-t", str(settings.n_threads), "-fa", settings.flash_attn]
    command += ["-ctk", settings.type_k, "-ctv", settings.type_v]
    return [*command, "-ngl", "all" if devices else "0", "--device", ",".join(devices) or "none"]


@contextmanager
def table_file(plan: PlacementPlan | None) -> Iterator[dict[str, str]]:
    """The environment of a llama.cpp program that obeys the plan; its table is a file that is gone afterwards."""
    environment = {name: value for name, value in os.environ.items() if name != MAP_VARIABLE}
    if plan is None:
        yield environment
        return
    with tempfile.NamedTemporaryFile("w", prefix="oallama-", suffix=".map") as table:
        table.write(plan.to_backend_map())
        table.flush()
        yield environment | {MAP_VARIABLE: table.name} | tuned_variable(plan.devices)
