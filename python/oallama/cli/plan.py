"""`oallama plan`: where every tensor goes, and why."""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from oallama.base.jsonfile import write_text_atomic
from oallama.data.plan import PlacementPlan
from oallama.errors import OallamaError
from oallama.loading import autoplan, start
from oallama.loading.autoplan import Considered
from oallama.loading.verify import verify as run_verify
from oallama.planning import Workload
from oallama.planning.tensor_seconds import tensor_seconds
from oallama.profiling.datasheet import Datasheet, make_profile
from oallama.views.arenas import render_arenas
from oallama.views.candidates import render_candidates
from oallama.views.placement_map import placement_map
from oallama.views.placement_svg import placement_svg
from oallama.views.plan_report import plan_report
from oallama.views.plan_table import plan_title, render_plan

from ..views.verification import render_verification
from .drafts import plan_pair, refuse_what_shows_one_model, show_pair
from .groups import grouped
from .options import Drafts, Hardware, Kernels, Model, Planner, Sizes, Vram, settings
from .terminal import err, out, progress_bar, warn_if_busy

KEPT = (
    "oallama: the plan that was kept at an earlier start, as `oallama run` takes it; --explain plans anew and shows "
    "all candidates"
)
FORMATS = ("table", "json", "llama.cpp", "llama-bench", "map")


@dataclass(frozen=True)
class Request:
    """What to make fast."""

    n_prompt: Annotated[
        int | None,
        typer.Option(min=0, help="Prompt tokens of the request to make fast; default: 512, at most half the context."),
    ] = None
    n_generate: Annotated[int, typer.Option(min=1, help="Generated tokens of the request to make fast.")] = 128
    n_depth: Annotated[
        int | None, typer.Option(min=0, help="Tokens in the cache before it; default: a quarter of the context.")
    ] = None

    def workload(self, n_ctx: int, parallel: int) -> Workload:
        """Of so many sequences in a context of n_ctx tokens."""
        usual = autoplan.default_workload(n_ctx, parallel)
        n_prompt = usual.n_prompt if self.n_prompt is None else self.n_prompt
        depth = usual.depth if self.n_depth is None else self.n_depth
        return Workload(n_prompt, self.n_generate, depth, parallel)


@dataclass(frozen=True)
class Ways:
    """What a plan may do, and how it is found."""

    recheck: Annotated[
        bool, typer.Option("--recheck", help="Re-measure a few operators first: has the machine changed since?")
    ] = False
    all_logits: Annotated[
        bool, typer.Option("--all-logits", help="Keep memory for the logits of all rows (embeddings, drafts).")
    ] = False
    streams: Annotated[
        bool, typer.Option("--streams/--no-streams", help="Whether weights may be streamed to the accelerator.")
    ] = True
    offline_arenas: Annotated[
        bool, typer.Option("--offline-arenas", help="Lay out compute buffers offline, in fewer bytes than ggml.")
    ] = False
    repack: Annotated[
        bool,
        typer.Option(
            "--repack/--no-repack",
            help="Whether weights on the CPU may be repacked or tiled for faster kernels, which round differently.",
        ),
    ] = True
    own_attention: Annotated[
        bool,
        typer.Option(
            "--own-attention/--no-own-attention",
            help="Whether attention on the CPU may be computed by oallama's kernels, which round differently.",
        ),
    ] = True
    paper: Annotated[bool, typer.Option("--paper", help="OATO literally as published.")] = False
    fraction: Annotated[float | None, typer.Option(help="Share of the memory that weights may take.")] = None


@dataclass(frozen=True)
class Shown:
    """What is printed and written."""

    explain: Annotated[bool, typer.Option("--explain", help="Show every candidate and why the plan was chosen.")] = (
        False
    )
    verify: Annotated[
        int,
        typer.Option(
            min=0,
            help="Load and measure the N best candidates; take the fastest. With --draft or --heads: count guesses.",
            metavar="N",
        ),
    ] = 0
    memory: Annotated[
        bool, typer.Option("--memory", help="Show what the compute buffers hold and what they need at least.")
    ] = False
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write the plan (JSON) to this file.")] = None
    html: Annotated[Path | None, typer.Option("--html", help="Write a report with pictures to this file.")] = None
    svg: Annotated[Path | None, typer.Option("--svg", help="Write the map of all matrices to this file.")] = None
    format: Annotated[str, typer.Option(help=f"What to print: {', '.join(FORMATS)}.")] = "table"
    json: Annotated[bool, typer.Option("--json", help="Same as --format json.")] = False

    @property
    def written(self) -> list[Path]:
        return [path for path in (self.output, self.html, self.svg) if path]

    @property
    def needs_candidates(self) -> bool:
        """Whether more than the plan itself is wanted."""
        return bool(self.explain or self.verify or self.memory or self.html or self.svg)

    @property
    def printed(self) -> str:
        """One of FORMATS.

        Raises:
            OallamaError: for another one.
        """
        if self.format not in FORMATS:
            raise OallamaError(f"unknown --format {self.format!r}; expected one of {', '.join(FORMATS)}")
        return "json" if self.json else self.format


@grouped
def plan(
    model: Model,
    *,
    vram: Vram = None,
    planner: Planner = "auto",
    elsewhere: Annotated[bool, typer.Option("--elsewhere", help="Plan for the machine of the profile.")] = False,
    datasheet: Annotated[
        str | None, typer.Option(help="Plan for the machine in this datasheet (a name or a file), by computed times.")
    ] = None,
    hardware: Hardware,
    sizes: Sizes,
    parallel: Annotated[int, typer.Option(min=1, help="Sequences that generate at once.")] = 1,
    kernels: Kernels,
    request: Request,
    ways: Ways,
    drafts: Drafts,
    shown: Shown,
) -> None:
    """Plan a model under a memory budget and show the plan."""
    printed = shown.printed
    sheet = None if datasheet is None else Datasheet.load(datasheet)
    if sheet and (given := "--profile" if hardware.profile else drafts.option):
        raise OallamaError(f"--datasheet computes the profile of one model; leave out {given}")
    elsewhere = elsewhere or sheet is not None
    if shown.verify and elsewhere:
        raise OallamaError("--verify measures on this machine; a plan for elsewhere is verified there")
    asked = wanted = settings(sizes, kernels, parallel)
    connection = hardware.connect(elsewhere)
    graph = autoplan.read_graph(model, wanted)
    if sheet:
        wanted = replace(wanted, n_threads=wanted.n_threads or sheet.cpu.cores)
    wanted = autoplan.resolve(wanted, graph.n_ctx_train, elsewhere)
    choices = replace(
        sizes.choices(),
        device=connection.device or hardware.device,
        profile=make_profile(graph, sheet, wanted.type_k, wanted.type_v) if sheet else hardware.profile,
        planner=planner,  # type: ignore[arg-type]  # make_plan names the planners there are
        workload=request.workload(wanted.n_ctx, parallel),
        elsewhere=elsewhere,
        all_candidates=shown.verify > 0,
        margin=hardware.margin,
        **vars(ways),
    )
    if option := drafts.option:
        of_one = {"--memory": shown.memory, "--html": shown.html, "--svg": shown.svg}
        refuse_what_shows_one_model(printed, of_one, option)
        joint = plan_pair(model, drafts, vram, wanted, choices, connection, measures=shown.verify > 0)
        show_pair(joint, printed, shown.explain, shown.output)
        return
    usual = choices.workload == autoplan.default_workload(wanted.n_ctx, parallel)
    of_start = replace(choices, workload=None) if usual else choices
    if not shown.needs_candidates and (kept := start.kept_plan(model, vram, asked, of_start)):
        err.print(KEPT, soft_wrap=True)
        _write(kept, shown, printed)
        return
    with progress_bar("profiling") as report:
        considered = autoplan.consider(model, graph, vram, wanted, choices, report)
    found = considered.found
    made = considered.with_terms(found.best)
    beside = out if printed == "table" else err
    if shown.explain:
        beside.print(render_candidates(found))
    if shown.verify:
        plans = [considered.with_terms(plan) for plan in [*found.plans.values()][: shown.verify]]
        made = _measured(model, plans, connection.endpoints, wanted.n_threads)
    if shown.memory:
        arenas = autoplan.read_arenas(model, made, wanted, choices)
        beside.print(render_arenas(arenas, offline=made.offline_arenas))
    if shown.html or shown.svg:
        _draw(made, considered, shown)
    _write(made, shown, printed)


def _write(made: PlacementPlan, shown: Shown, printed: str) -> None:
    if shown.output:
        made.save(shown.output)
    show(made, printed)
    if shown.written and printed == "table":
        out.print(f"written to {', '.join(map(str, shown.written))}", soft_wrap=True)


def _draw(made: PlacementPlan, considered: Considered, shown: Shown) -> None:
    times = tensor_seconds(considered.space, made)
    if shown.html:
        command = shlex.join(["oallama", *sys.argv[1:]])
        # The fastest measured one need not be the fastest predicted one.
        plans = sorted(
            considered.found.plans.items(),
            key=lambda item: (item[1].tensors, item[1].context) != (made.tensors, made.context),
        )
        found = replace(considered.found, plans=dict(plans))
        write_text_atomic(shown.html, plan_report(made, found, times, command), "report")
    if shown.svg:
        svg = placement_svg(placement_map(made, times), title=plan_title(made))
        write_text_atomic(shown.svg, svg, "picture")


def _measured(model: Path, plans: list[PlacementPlan], endpoints: tuple[str, ...], n_threads: int) -> PlacementPlan:
    """The fastest of the plans on this machine, with what was measured."""
    warn_if_busy()
    with progress_bar("verifying") as report:
        measured = run_verify(model, plans, rpc_servers=endpoints, n_threads=n_threads, progress=report)
    err.print(render_verification(measured))
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
