"""`oallama demo`: the main job from a model file to a measured comparison, each step announced."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from oallama.bench import Result, Sweep, medians, run_bench, write_reports
from oallama.bench.baselines import is_unpatched_here, what_stands_in
from oallama.bench.plain_page import BUDGET, CONTEXT, START, TOKENS, plain_page
from oallama.bench.rivals import Rivals, interleave_for
from oallama.bench.verdict import fastest, is_narrow, surprises, verdict
from oallama.data.plan import PlacementPlan
from oallama.engine import device_list, model_file
from oallama.engine.load_settings import Settings
from oallama.engine.rpc import share_processor
from oallama.errors import OallamaError
from oallama.loading import autoplan, start
from oallama.loading.autoplan import Choices
from oallama.loading.completion import complete
from oallama.loading.stock_plans import stock_plans
from oallama.modelmaker import make_model
from oallama.planning import OperatorGraph, Workload, compare, format_bytes
from oallama.profiling.other_work import OtherWork
from oallama.profiling.recorder import cache_dir
from oallama.storyteller import demo_model
from oallama.storyteller.exam import PAGE_END, mark
from oallama.views.plan_table import render_plan

from .demo_alone import NO_GPU, Alone, show_profile
from .devices import devices_table
from .options import Kernels, Rpc, Sizes, Threads, connect, settings
from .terminal import interruptible, out, progress_bar, warn_if_busy

MODEL = "demo-llama-247M-Q8_0.gguf"
SHAPE = {"n_layer": 16, "n_embd": 1024, "n_ff": 2816, "n_head": 16, "n_head_kv": 4}
PROMPT = "The quick brown fox"
SWEEP = Sweep(prompts=(64,), gens=(16,), repeats=200, limit_s=60.0, enough=is_narrow)
WORKLOAD = Workload(n_prompt=SWEEP.prompts[0], n_generate=SWEEP.gens[0])
STEPS = 6
RIVALS = {
    "llama.cpp": "llama.cpp's layer split",
    "llama.cpp --fit": "llama.cpp's --fit",
    "llama.cpp CPU": "llama.cpp's CPU alone",
}


def demo(
    model: Annotated[Path | None, typer.Option(help="GGUF file; default: one with random weights is built.")] = None,
    folder: Annotated[
        Path | None, typer.Option("--out", help="Where plan, reports and that model go; default: in the cache folder.")
    ] = None,
    vram: Annotated[str, typer.Option(help="Memory budget of the accelerator.")] = "50%",
    ctx: Annotated[int, typer.Option(min=128, help="Tokens of context.")] = 1024,
    rpc: Rpc = None,
    threads: Threads = 0,
) -> None:
    """Build or take a model, profile, plan under a budget, generate, and measure against llama.cpp."""
    local = not rpc and not _has_accelerator()
    if local:
        share_processor()
    results = folder or cache_dir() / "demo"
    try:
        results.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise OallamaError(f"cannot write to {results}: {e.strerror}; give another folder with --out") from None
    path = _model(model, results)
    connection = connect(rpc, False)
    chosen = connection.device or autoplan.find_accelerator()
    _step(2, "Devices")
    if local:
        out.print(NO_GPU, markup=False)
        chosen = connect(None, True).device
        threads = threads or max(1, len(os.sched_getaffinity(0)) // 2)
    out.print(devices_table(device_list.devices()))
    wanted = settings(Sizes(ctx), Kernels(threads=threads))
    graph = autoplan.read_graph(path, wanted)
    resolved = autoplan.resolve(wanted, graph.n_ctx_train)
    alone = Alone.of(path, graph, resolved, WORKLOAD) if local else None
    run = _Run(path, graph, resolved, Choices(device=chosen, workload=WORKLOAD), results, alone)
    _step(3, "Profile")
    warn_if_busy()
    run.profile()
    _step(4, f"Plan under a budget of {vram}")
    rivals = run.plan(vram)
    _step(5, "Generate")
    run.generate(rivals.plan, readable=model is not None)
    if model is None:
        _write_page(run.settings, run.choices)
    _step(6, "Measure against llama.cpp at the same device bytes")
    run.measure(rivals, connection.endpoints)


def _has_accelerator() -> bool:
    """Asked in another process: what follows from the answer must be set before this one loads the engine."""
    program = (
        "from oallama.engine.device_list import ACCELERATOR_TYPES as types, devices\n"
        "print(any(device.type in types for device in devices()))"
    )
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    return answer.stdout.strip() == "True"


def _write_page(wanted: Settings, choices: Choices) -> None:
    """Let the demo model write a page with up to half of its weights on the device, and say how much of it is true."""
    from oallama.llama import Llama

    path = demo_model()
    small = replace(wanted, n_ctx=CONTEXT, n_batch=CONTEXT, n_ubatch=CONTEXT)
    shared = replace(choices, planner="oato")  # "auto" may leave a model of this size on the CPU
    with progress_bar("profiling") as report:
        plan = start.plan_model(path, BUDGET, small, shared, report)
    with interruptible():
        llm = Llama(str(path), plan=plan, verbose=False, n_threads=wanted.n_threads)
    out.print(f"{path.name}, up to {BUDGET} of its weights on {' and '.join(plan.budgets)}:", soft_wrap=True)
    out.print(f"[dim]{START}[/]", end="")
    _, text = complete(llm, START, TOKENS, 0.0, None, stop=[PAGE_END])
    llm.close()
    marks = mark(START + text)
    out.print(f"{marks.true} of {marks.true + len(marks.faults)} sentences and answers are true.")
    plain = plain_page(wanted.n_threads)
    who = "unpatched llama.cpp" if is_unpatched_here() else "this engine without a plan"
    other = "the same page." if plain == text else f"another page:\n{START}{plain}"
    out.print(escape(f"On the CPU {who} writes {other}"), soft_wrap=True)


def _step(number: int, title: str) -> None:
    out.print(f"\n[bold cyan]{number}/{STEPS}[/] [bold]{escape(title)}[/]")


def _model(given: Path | None, folder: Path) -> Path:
    _step(1, "Model")
    path = given or folder / MODEL
    if given is None and not path.exists():
        with progress_bar(f"writing {path.name}") as report:
            make_model(
                path, arch="llama", shape="small", file_type="Q8_0", overrides=SHAPE,
                progress=lambda done, total: report(done, total, f"{format_bytes(done)} of {format_bytes(total)}"),
            )  # fmt: skip
        out.print(f"{path}: built, random weights", soft_wrap=True)
    else:
        out.print(f"{model_file.check_gguf(path)}: {format_bytes(path.stat().st_size)}", soft_wrap=True)
    return path


@dataclass(frozen=True)
class _Run:
    """The steps after the model and the device are known. alone: where a device only stands in for one."""

    model: Path
    graph: OperatorGraph
    settings: Settings
    choices: Choices
    folder: Path
    alone: Alone | None
    predicted_s: dict[str, float] = field(default_factory=dict)  # of the measured request, by engine

    def profile(self) -> None:
        if self.alone:
            show_profile(self.graph, self.alone.choices, self.alone.settings)
        show_profile(self.graph, self.choices, self.settings)

    def plan(self, vram: str) -> Rivals:
        """The fastest plan and what stock llama.cpp does in the same bytes; prints the plan and what is predicted."""
        if self.alone:
            self.alone.show_plan()
        considered = autoplan.consider(self.model, self.graph, vram, self.settings, self.choices)
        plan = considered.found.best
        stock = stock_plans(self.model, self.graph, plan, vram, self.settings, self.choices)
        alone = replace(self.choices, planner="stock-cpu")
        cpu = autoplan.plan_graph(self.model, self.graph, None, self.settings, alone)
        plan.save(self.folder / "plan.json")
        out.print(render_plan(plan))
        names = {"layers": "llama.cpp's layer split", "fit": "llama.cpp's --fit"}
        rivals = {names[name]: stock_plan for name, stock_plan in stock.items()}
        rivals["llama.cpp's CPU alone"] = cpu
        predicted = compare({"this plan": plan, **rivals}, considered.space.doubted_noise, spinning=rivals)
        out.print(f"[bold]Predicted:[/] {escape(predicted.sentence)}.")
        self.predicted_s.update({"oallama": plan.predicted.request_s, "llama.cpp CPU": cpu.predicted.request_s})
        of_stock = {"layers": "llama.cpp", "fit": "llama.cpp --fit"}
        self.predicted_s.update({of_stock[name]: made.predicted.request_s for name, made in stock.items()})
        return Rivals(plan, stock, vram)

    def generate(self, plan: PlacementPlan, readable: bool) -> None:
        """Complete a prompt under the plan; what random weights answer is not printed."""
        from oallama.llama import Llama

        with interruptible():
            llm = Llama(str(self.model), plan=plan, verbose=False, n_threads=self.settings.n_threads)
        if readable:
            out.print(f"[dim]{PROMPT}[/]", end="")
        clock, _ = complete(llm, PROMPT, 32, 0.0, None, quiet=not readable)
        out.print(clock.summary(len(llm.tokenize(PROMPT.encode()))))
        out.print(llm.placement())
        llm.close()

    def measure(self, rivals: Rivals, endpoints: tuple[str, ...]) -> None:
        if stand_in := what_stands_in():
            out.print(f"{stand_in}.", soft_wrap=True)
        with ExitStack() as stack, progress_bar("measuring") as report, OtherWork() as others:
            engines = rivals.engines(self.settings, endpoints, self.alone is not None, stack, everything=False)
            if self.alone:
                engines += self.alone.engines()
                self.predicted_s[self.alone.ours] = self.alone.considered.found.best.predicted.request_s
            wanted = interleave_for("reload" if endpoints else "loaded", engines, rivals.plan)
            results = run_bench(self.model, engines, replace(SWEEP, interleave=wanted), report, argv=sys.argv)
        out.print(medians.table(results))
        if self.alone:
            self.alone.conclude(results)
        label = "With the stand-in:" if self.alone else "Verdict:"
        out.print(f"[bold]{label}[/] {escape(verdict(results, 'oallama', RIVALS))}.")
        for line in surprises(results, "oallama", self.predicted_s, others.cpus):
            out.print(escape(f"{line}."))
        if self.alone:
            fewer = f"the CPU alone with {self.settings.n_threads} of its threads"
            own = "the plan with the stand-in" if len(rivals.plan.devices) > 1 else fewer
            self.alone.keep(results, {**RIVALS, "oallama": own})
        else:
            _keep(results)
        paths = write_reports(results, self.folder / "results")
        out.print(f"written: {', '.join(map(str, [self.folder / 'plan.json', *paths]))}", soft_wrap=True)


def _keep(results: Sequence[Result]) -> None:
    """Say what this machine should run, by what was measured."""
    best = fastest(results, "oallama").engine
    if best == "oallama":
        out.print("[bold]Kept:[/] this plan.")
    else:
        out.print(f"[bold]Kept:[/] {RIVALS[best]}; `oallama run` and `oallama serve` measure before they choose.")
