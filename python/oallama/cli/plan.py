"""`oallama plan`: where every tensor goes, and why."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from oallama.data.plan import PlacementPlan
from oallama.errors import OallamaError
from oallama.loading import autoplan
from oallama.loading.autoplan import Choices
from oallama.loading.verify import verify as run_verify
from oallama.planning import Workload
from oallama.views.arenas import render_arenas
from oallama.views.candidates import render_candidates
from oallama.views.plan_table import render_plan

from ..views.verified import render_verified
from .options import (
    Batch,
    Ctx,
    Device,
    FlashAttn,
    LocalRpc,
    Margin,
    Model,
    Planner,
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
from .terminal import err, out, progress_bar, warn_if_busy

FORMATS = ("table", "json", "llama.cpp", "llama-bench", "map")


def plan(
    model: Model,
    vram: Vram = None,
    margin: Margin = None,
    planner: Planner = "auto",
    explain: Annotated[
        bool, typer.Option("--explain", help="Show every candidate and why the plan was chosen.")
    ] = False,
    verify: Annotated[
        int, typer.Option(min=0, help="Load and measure the N best candidates; take the fastest.", metavar="N")
    ] = 0,
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
    n_depth: Annotated[
        int | None, typer.Option(min=0, help="Tokens in the cache before it; default: a quarter of the context.")
    ] = None,
    recheck: Annotated[
        bool, typer.Option("--recheck", help="Re-measure a few operators first: has the machine changed since?")
    ] = False,
    all_logits: Annotated[
        bool, typer.Option("--all-logits", help="Keep memory for the logits of all rows (embeddings, drafts).")
    ] = False,
    streams: Annotated[
        bool, typer.Option("--streams/--no-streams", help="Whether weights may be streamed to the accelerator.")
    ] = True,
    offline_arenas: Annotated[
        bool, typer.Option("--offline-arenas", help="Lay out compute buffers offline, in fewer bytes than ggml.")
    ] = False,
    memory: Annotated[
        bool, typer.Option("--memory", help="Show what the compute buffers hold and what they need at least.")
    ] = False,
    repack: Annotated[
        bool,
        typer.Option(
            "--repack/--no-repack",
            help="Whether weights on the CPU may be repacked for faster kernels, which round differently.",
        ),
    ] = True,
    paper: Annotated[bool, typer.Option("--paper", help="OATO literally as published.")] = False,
    fraction: Annotated[float | None, typer.Option(help="Share of the memory that weights may take.")] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write the plan (JSON) to this file.")] = None,
    format: Annotated[str, typer.Option(help=f"What to print: {', '.join(FORMATS)}.")] = "table",
    json: Annotated[bool, typer.Option("--json", help="Same as --format json.")] = False,
) -> None:
    """Plan a model under a memory budget and show the plan."""
    if format not in FORMATS:
        raise OallamaError(f"unknown --format {format!r}; expected one of {', '.join(FORMATS)}")
    if verify and elsewhere:
        raise OallamaError("--verify measures on this machine; a plan for elsewhere is verified there")
    wanted = settings(ctx, batch, ubatch, type_k, type_v, flash_attn, threads, parallel)
    connection = connect(rpc, local_rpc, None if elsewhere else device)
    graph = autoplan.read_graph(model, wanted)
    wanted = autoplan.resolve(wanted, graph.n_ctx_train)
    depth = autoplan.default_workload(wanted.n_ctx).depth if n_depth is None else n_depth
    choices = Choices(
        device=connection.device or device,
        profile=profile,
        planner=planner,  # type: ignore[arg-type]  # make_plan names the planners there are
        workload=Workload(n_prompt, n_generate, depth, parallel),
        paper=paper,
        fraction=fraction,
        elsewhere=elsewhere,
        fixed_ubatch=ubatch is not None,
        all_logits=all_logits,
        recheck=recheck,
        streams=streams,
        offline_arenas=offline_arenas,
        repack=repack,
        margin=margin,
    )
    with progress_bar("profiling") as report:
        found = autoplan.candidates(model, graph, vram, wanted, choices, report)
    made = found.best
    if explain:
        err.print(render_candidates(found)) if json or format != "table" else out.print(render_candidates(found))
    if verify:
        made = _measured(model, [*found.plans.values()][:verify], connection.endpoints, wanted.n_threads)
    if memory:
        table = render_arenas(autoplan.read_arenas(model, made, wanted, choices), offline=made.offline_arenas)
        (err if json or format != "table" else out).print(table)
    if output:
        made.save(output)
    show(made, "json" if json else format)
    if output and format == "table" and not json:
        out.print(f"written to {output}", soft_wrap=True)


def _measured(model: Path, plans: list[PlacementPlan], endpoints: tuple[str, ...], n_threads: int) -> PlacementPlan:
    """The fastest of the plans on this machine, with what was measured."""
    warn_if_busy()
    with progress_bar("verifying") as report:
        measured = run_verify(model, plans, rpc_servers=endpoints, n_threads=n_threads, progress=report)
    err.print(render_verified(measured))
    return measured[0]


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
