"""What `oallama demo` shows of a machine without a GPU: the CPU alone with all its threads, ours and llama.cpp's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from rich.markup import escape

from oallama.bench import Engine, LoadParams, Result
from oallama.bench.baselines import cpu_only
from oallama.bench.planned import planned
from oallama.bench.verdict import fastest, verdict
from oallama.data.plan import HOST
from oallama.engine import runtime
from oallama.engine.load_settings import Settings
from oallama.loading import autoplan
from oallama.loading.autoplan import Choices, Considered
from oallama.planning import OperatorGraph, Workload, compare
from oallama.profiling.fingerprint import cpu_set

from .profile import profile_table
from .terminal import out, progress_bar

NO_GPU = (
    "There is no GPU on this machine. So `oallama run` plans for the CPU alone with all its threads, and that plan "
    "comes first below. Then a loopback RPC server stands in for a GPU, to show what a plan does with one: a second "
    "device with memory of its own, but with the same processor behind it. The host gets half of the threads beside "
    "it, so that the device is the faster side, as a GPU would be."
)


def show_profile(graph: OperatorGraph, choices: Choices, settings: Settings) -> None:
    with progress_bar("profiling") as report:
        measured = autoplan.profile_for(graph, choices, settings, report)
    out.print(profile_table(measured, graph, f"profile, CPU threads: {settings.n_threads}"))


@dataclass(frozen=True)
class Alone:
    """This machine without the stand-in. ours, theirs: names of its two engines."""

    model: Path
    graph: OperatorGraph
    settings: Settings
    choices: Choices

    @classmethod
    def of(cls, model: Path, graph: OperatorGraph, settings: Settings, workload: Workload) -> Alone:
        """settings: of the plan with the stand-in; only the threads differ."""
        return cls(model, graph, replace(settings, n_threads=len(cpu_set())), Choices(device=HOST, workload=workload))

    @property
    def ours(self) -> str:
        return f"oallama, {self.settings.n_threads} threads"

    @property
    def theirs(self) -> str:
        return f"llama.cpp, {self.settings.n_threads} threads"

    @cached_property
    def considered(self) -> Considered:
        """The best candidate is what `oallama run` measures first here."""
        return autoplan.consider(self.model, self.graph, None, self.settings, self.choices)

    def show_plan(self) -> None:
        plans, best = self.considered.found.plans, self.considered.found.best
        stock = {"llama.cpp": plans.get("stock-cpu", best)}
        predicted = compare({"oallama": best, **stock}, self.considered.space.noise, spinning=stock)
        out.print(f"[bold]The CPU alone, {self.settings.n_threads} threads:[/] {escape(predicted.sentence)}.")

    def engines(self) -> list[Engine]:
        plan, threads = self.considered.found.best, LoadParams(n_threads=self.settings.n_threads)
        sizes = {name: getattr(plan.context, name) for name in ("n_ctx", "n_batch", "n_ubatch")}
        ours = planned(plan, runtime.lib_dir(), threads, name=self.ours)
        return [ours, replace(cpu_only(replace(threads, **sizes)), name=self.theirs)]

    def conclude(self, results: Sequence[Result]) -> None:
        """Say how fast this machine is, before the stand-in is spoken of."""
        said = verdict(results, self.ours, {self.theirs: "llama.cpp with as many threads"}, "oallama on the CPU alone")
        out.print(f"[bold]Verdict:[/] {escape(said)}.")

    def keep(self, results: Sequence[Result], names: Mapping[str, str]) -> None:
        """Say what this machine should run. names: what to call engines with the stand-in, or with fewer threads."""
        best = fastest(results, self.ours).engine
        if best == self.ours:
            kept = f"the plan for the CPU alone with {self.settings.n_threads} threads, which `oallama run` takes"
        elif best == self.theirs:
            kept = "llama.cpp's CPU alone; `oallama run` measures it before it chooses"
        else:
            kept = f"{names[best]}, which was the fastest beside what else runs now"
        out.print(f"[bold]Kept:[/] {escape(kept)}.")
