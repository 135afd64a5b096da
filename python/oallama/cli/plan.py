"""`oallama plan`: where every tensor goes, and why."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from oallama import autoplan
from oallama.autoplan import Choices
from oallama.errors import OallamaError
from oallama.plan import PlacementPlan
from oallama.planning.cost import Workload
from oallama.planning.render import render_plan

from .options import (
    Batch,
    Ctx,
    Device,
    FlashAttn,
    LocalRpc,
    Model,
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
from .terminal import out, progress_bar

FORMATS = ("table", "json", "llama.cpp", "llama-bench", "map")


def plan(
    model: Model,
    vram: Vram = None,
    planner: Annotated[
        str, typer.Option(help="oato, layers (stock -ngl), cpu, all; best: fastest of the first 3.")
    ] = "best",
    profile: Profile = None,
    elsewhere: Annotated[bool, typer.Option("--elsewhere", help="Plan for the machine of the profile.")] = False,
    device: Device = None,
    rpc: Rpc = None,
    local_rpc: LocalRpc = False,
    ctx: Ctx = None,
    batch: Batch = None,
    ubatch: Ubatch = None,
    parallel: Annotated[int, typer.Option(min=1, help="Parallel sequences.")] = 1,
    type_k: TypeK = "f16",
    type_v: TypeV = "f16",
    flash_attn: FlashAttn = "auto",
    threads: Threads = 0,
    n_prompt: Annotated[int, typer.Option(min=0, help="Prompt tokens of the request to make fast.")] = 512,
    n_generate: Annotated[int, typer.Option(min=1, help="Generated tokens of the request to make fast.")] = 128,
    paper: Annotated[bool, typer.Option("--paper", help="OATO literally as published.")] = False,
    fraction: Annotated[float | None, typer.Option(help="Share of the memory that weights may take.")] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write the plan (JSON) to this file.")] = None,
    format: Annotated[str, typer.Option(help=f"What to print: {', '.join(FORMATS)}.")] = "table",
    json: Annotated[bool, typer.Option("--json", help="Same as --format json.")] = False,
) -> None:
    """Plan a model under a memory budget and show the plan."""
    if format not in FORMATS:
        raise OallamaError(f"unknown --format {format!r}; expected one of {', '.join(FORMATS)}")
    choices = Choices(
        device=connect(rpc, local_rpc, None if elsewhere else device).device or device,
        profile=profile,
        planner=planner,  # type: ignore[arg-type]  # make_plan names the planners there are
        workload=Workload(n_prompt, n_generate),
        paper=paper,
        fraction=fraction,
        elsewhere=elsewhere,
    )
    wanted = settings(ctx, batch, ubatch, type_k, type_v, flash_attn, threads, parallel)
    with progress_bar("profiling") as report:
        made = autoplan.plan_model(model, vram, wanted, choices, report)
    if output:
        made.save(output)
    show(made, "json" if json else format)
    if output and format == "table" and not json:
        out.print(f"written to {output}", soft_wrap=True)


def show(plan: PlacementPlan, format: str) -> None:
    """Print a plan in one of FORMATS; all but "table" are for programs, so nothing is wrapped or coloured."""
    if format == "table":
        out.print(render_plan(plan))
    elif format == "json":
        print(plan.to_json(), end="")
    elif format == "map":
        print(plan.to_backend_map(), end="")
    else:
        print(shlex.join(plan.to_llama_cpp_flags(format)))  # type: ignore[arg-type]
