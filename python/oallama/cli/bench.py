"""`oallama bench`: TTFT and TPOT of plans against unpatched llama.cpp at the same device bytes."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from oallama.base.jsonfile import write_text_atomic
from oallama.base.printing import print_json, say
from oallama.bench import Result, Sweep, medians, run_bench, write_plot, write_reports
from oallama.bench.baselines import what_stands_in
from oallama.bench.html_report import html_report
from oallama.bench.report import record
from oallama.bench.rivals import Rivals, interleave_for
from oallama.data.plan import HOST, PlacementPlan
from oallama.engine.load_settings import Settings
from oallama.errors import OallamaError
from oallama.loading import autoplan, given_plan
from oallama.loading.autoplan import Choices
from oallama.loading.budgets import refuse_margin
from oallama.loading.stock_plans import stock_plans
from oallama.planning import OperatorGraph, Workload

from .groups import grouped
from .options import Hardware, Json, Kernels, Model, Plan, Planner, Sizes, settings
from .terminal import out, progress_bar, warn_if_busy

BUDGETS = ("25%", "50%", "75%")


@dataclass(frozen=True)
class Rounds:
    """What is measured how often."""

    prompts: Annotated[str, typer.Option(help="Prompt tokens.")] = "32,64,128,256,512"
    gens: Annotated[str, typer.Option(help="Generated tokens.")] = "32"
    depths: Annotated[str, typer.Option(help="Tokens already in the cache.")] = "0"
    repeats: Annotated[int, typer.Option(min=1, help="Measured rounds.")] = 5
    interleave: Annotated[str, typer.Option(help="loaded: all engines stay in memory; reload: one at a time.")] = (
        "loaded"
    )

    def sweep(self, reload: bool) -> Sweep:
        """reload: one engine in memory at a time, whatever was asked for."""
        sizes = (_numbers(self.prompts), _numbers(self.depths), _numbers(self.gens))
        return Sweep(*sizes, self.repeats, interleave="reload" if reload else self.interleave)


@grouped
def bench(
    model: Model,
    *,
    budget: Annotated[
        list[str] | None,
        typer.Option(
            "--vram", "--budget", help=f"Budget; repeatable. Default {', '.join(BUDGETS)}; none without accelerator."
        ),
    ] = None,
    plan: Plan = None,
    planner: Planner = "auto",
    baseline: Annotated[
        bool, typer.Option(help="Measure llama.cpp, too: unpatched where it is built, else this engine without a plan.")
    ] = True,
    rounds: Rounds,
    hardware: Hardware,
    ctx: Annotated[int | None, typer.Option(min=1, help="Tokens of context; default: what the sweep needs.")] = None,
    kernels: Kernels,
    output: Annotated[
        Path | None, typer.Option("--out", help="Write reports to this folder: .md, .csv, .jsonl, .png.")
    ] = None,
    html: Annotated[Path | None, typer.Option("--html", help="Write a report with pictures to this file.")] = None,
    json: Json = False,
) -> None:
    """Measure a model under budgets, interleaved with llama.cpp: layer split, --fit, the CPU and the device alone.

    A plan without a device is measured beside llama.cpp's CPU with -fa 1 and 0.
    """
    if baseline and (stand_in := what_stands_in()):
        say(f"note: {stand_in}")
    sweep = rounds.sweep(reload=bool(hardware.rpc))
    connection = hardware.connect()
    wanted = settings(Sizes(ctx or sweep.n_ctx()), kernels)
    if plan:
        refuse_margin(hardware.margin)
        made = given_plan.load_plan(plan)
        context = made.context
        given_plan.check_plan(made, model, replace(wanted, **vars(context)))
        # llama.cpp gets the same cache; its micro-batch and form of attention are its own.
        same = {name: getattr(context, name) for name in ("n_ctx", "n_batch", "n_seq_max", "type_k", "type_v")}
        wanted = replace(wanted, **same)
    graph = autoplan.read_graph(model, wanted)
    warn_if_busy()
    wanted = autoplan.resolve(wanted, graph.n_ctx_train)
    choices = Choices(
        device=connection.device,
        profile=hardware.profile,
        planner=planner,  # type: ignore[arg-type]  # make_plan names the planners there are
        workload=_middle(sweep),
        margin=hardware.margin,
    )
    jobs: Sequence[PlacementPlan | str | None] = [made] if plan else _budgets(budget, choices)
    measured: list[tuple[str, PlacementPlan, list[Result]]] = []
    for job in jobs:
        rivals = _rivals(model, graph, job, wanted, choices, baseline)
        with ExitStack() as stack, progress_bar(f"bench {rivals.label}") as report:
            user_rpc = connection.endpoints[: len(hardware.rpc or ())]
            engines = rivals.engines(wanted, user_rpc, hardware.local_rpc, stack)
            cells = replace(sweep, interleave=interleave_for(sweep.interleave, engines, rivals.plan))
            results = run_bench(model, engines, cells, report, argv=sys.argv)
        _report(results, rivals.label, output, json)
        measured.append((rivals.label, rivals.plan, results))
    if html:
        write_text_atomic(html, html_report(measured, shlex.join(["oallama", *sys.argv[1:]])), "report")
        if not json:
            out.print(f"written: {html}", soft_wrap=True)
    if json:
        every = [result for _, _, results in measured for result in results]
        print_json([record(result, every) for result in every])


def _budgets(given: Sequence[str] | None, choices: Choices) -> Sequence[str | None]:
    """Those given, else the usual ones; None where there is no accelerator to have one."""
    return given or (BUDGETS if autoplan.choose_devices(choices.device) else [None])


def _rivals(
    model: Path,
    graph: OperatorGraph,
    job: PlacementPlan | str | None,
    wanted: Settings,
    choices: Choices,
    baseline: bool,
) -> Rivals:
    """The plan of a job, and what llama.cpp does with the same total bytes, or on the CPU."""
    if isinstance(job, PlacementPlan):
        plan, label = job, job.hash[:8]
        choices = replace(choices, device=next((d for d in plan.devices if d != HOST), HOST))
    else:
        label = job or HOST
        with progress_bar("profiling") as report:
            plan = autoplan.plan_graph(model, graph, job, wanted, choices, report)
    if not baseline or not autoplan.choose_devices(choices.device):
        return Rivals(plan, {}, label, on_cpu=baseline)
    with progress_bar("profiling") as report:
        return Rivals(plan, stock_plans(model, graph, plan, label, wanted, choices, report), label)


def _middle(sweep: Sweep) -> Workload:
    """The request in the middle of the sweep, for which plans are made."""
    prompt, gen, depth = (sorted(values)[len(values) // 2] for values in (sweep.prompts, sweep.gens, sweep.depths))
    return Workload(prompt, gen, depth)


def _report(results: list[Result], label: str, folder: Path | None, json: bool) -> None:
    if not json:
        out.print(medians.table(results))
    if folder is None:
        return
    stem = folder / ("bench-" + re.sub(r"\W", "", label.replace("%", "pct")))
    paths = write_reports(results, stem)
    try:
        paths.append(write_plot(results, stem.with_suffix(".png")))
    except OallamaError as error:
        say(f"no plot: {error}")
    if not json:
        out.print(f"written: {', '.join(map(str, paths))}\n", soft_wrap=True)


def _numbers(text: str) -> tuple[int, ...]:
    if not re.fullmatch(r"\d+(,\d+)*", text):
        raise OallamaError(f"expected numbers with commas such as 32,64,128, got {text!r}")
    return tuple(int(n) for n in text.split(","))
