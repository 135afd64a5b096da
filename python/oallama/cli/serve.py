"""`oallama serve`: llama.cpp's own server, built from the patched source, obeying a plan."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer

from oallama import autoplan, runtime
from oallama.autoplan import Choices
from oallama.children import die_with_parent, forwarded_signals
from oallama.engine import Settings
from oallama.plan import HOST, PlacementPlan

from .options import (
    Batch,
    Ctx,
    Device,
    FlashAttn,
    LocalRpc,
    Model,
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
from .terminal import progress_bar, say

MAP_VARIABLE = "OALLAMA_BACKEND_MAP"


def serve(
    context: typer.Context,
    model: Model,
    plan: Plan = None,
    vram: Vram = None,
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
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = 8080,
) -> None:
    """Serve the OpenAI API with llama-server; arguments after -- go to it unchanged."""
    connection = connect(rpc, local_rpc, device)
    made = wanted = None
    chosen = connection.device or autoplan.find_accelerator()
    if plan:
        made = autoplan.load_plan(plan)
        wanted = _planned_settings(made, ctx, batch, ubatch, parallel, threads)
        autoplan.check_plan(made, model, wanted)
    else:
        wanted = settings(ctx, batch, ubatch, type_k, type_v, flash_attn, threads, parallel or 1)
        if vram or chosen not in (None, HOST):
            with progress_bar("profiling") as report:
                made = autoplan.plan_model(model, vram, wanted, Choices(device=chosen, profile=profile), report)
    wanted = autoplan.resolve(wanted, autoplan.read_graph(model, wanted).n_ctx_train)
    command = server_command(model, wanted, made, connection.endpoints)
    command += ["--host", host, "--port", str(port), *context.args]
    where = f"by plan {made.hash[:8]}" if made else "on the CPU alone"
    say(f"serving {model.name} {where} on http://{host}:{port} (OpenAI API under /v1)")
    with table_file(made) as environment:
        code = run_server(command, environment)
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
        yield environment | {MAP_VARIABLE: table.name}


def run_server(command: list[str], environment: dict[str, str]) -> int:
    """Run a server until it ends; SIGINT and SIGTERM are passed on once, so that it can finish its requests."""
    # A session of its own: else a Ctrl-C reaches it twice, and the second one kills it at once.
    server = subprocess.Popen(command, env=environment, start_new_session=True, preexec_fn=die_with_parent)
    with forwarded_signals(server):
        try:
            return server.wait()
        finally:
            if server.poll() is None:
                server.kill()
                server.wait()
