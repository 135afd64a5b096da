"""`oallama weave`: what a hot model's guests cost, and what they wait for, in a cold model's process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from oallama.base.printing import say
from oallama.data.plan import HOST
from oallama.engine.load_settings import Settings
from oallama.engine.runtime import quiet
from oallama.loading import autoplan
from oallama.loading.autoplan import Choices, Progress
from oallama.loading.start import kept_plan
from oallama.planning.cost import CostModel
from oallama.profiling.fingerprint import cpu_set
from oallama.views.weave import render_weave
from oallama.weave.gpus import check_places, parse_places
from oallama.weave.plan import Load, estimate, guest_shape, measure
from oallama.weave.plan import plan as plan_weave

from .groups import grouped
from .options import Ctx, Json, Kernels, NoPlan, Sizes, TypeK, TypeV, Ubatch, settings
from .terminal import out, progress_bar, warn_if_busy

app = typer.Typer(help="Guests of a hot model in a cold model's process.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Keeps `plan` a command of its own name."""


@dataclass(frozen=True)
class Sequences:
    """Sequences of the models."""

    parallel: Annotated[int, typer.Option(min=1, help="Sequences of either model at home.")] = 4
    guests: Annotated[int | None, typer.Option(min=1, help="Sequences of the hot one beside; default: --parallel.")] = (
        None
    )
    depth: Annotated[int | None, typer.Option(min=0, help="Tokens that each has; default: half of --ctx.")] = None

    def load(self, n_ctx: int) -> Load:
        guests = self.parallel if self.guests is None else self.guests
        return Load(self.parallel, guests, self.parallel, n_ctx // 2 if self.depth is None else self.depth)


@dataclass(frozen=True)
class Cache:
    """The context of either model."""

    ctx: Ctx = None
    ubatch: Ubatch = None
    type_k: TypeK = "f16"
    type_v: TypeV = "f16"


def _costs(model: Path, names: Sequence[str], wanted: Settings, report: Progress) -> CostModel:
    """Of a model without a plan. names: of accelerators."""
    graph = autoplan.read_graph(model, wanted)
    resolved = autoplan.resolve(wanted, graph.n_ctx_train)
    names = list(dict.fromkeys(names))
    choices = Choices(device=",".join(names) or HOST)
    profile = autoplan.profile_for(graph, choices, resolved, report)
    return CostModel(graph, profile, names, autoplan.context_of(resolved))


def _planned_costs(model: Path, wanted: Settings, choices: Choices, report: Progress) -> CostModel:
    """Of a model by the plan that `oallama serve` would load it with."""
    graph = autoplan.read_graph(model, wanted)
    resolved = autoplan.resolve(wanted, graph.n_ctx_train)
    considered = autoplan.consider(model, graph, None, resolved, choices, report)
    made = kept_plan(model, None, resolved, choices) or considered.found.best
    return considered.space.builder_of(made).costs


@app.command("plan")
@grouped
def plan(
    hot: Annotated[Path, typer.Argument(help="GGUF file of the model with the most requests.", show_default=False)],
    cold: Annotated[Path, typer.Argument(help="GGUF file of the one that lends.", show_default=False)],
    *,
    sequences: Sequences,
    cache: Cache,
    device: Annotated[
        str | None, typer.Option(help='Where the models run: "hot=CUDA0,cold=CUDA1", or one device. Default: the CPU.')
    ] = None,
    no_plan: NoPlan = False,
    threads: Annotated[int, typer.Option(min=0, help="CPU threads of each model, 0: half of all.")] = 0,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Write the plan, for `serve --weave`.")] = None,
    json: Json = False,
) -> None:
    """Decide where the cold model looks for the hot one's attention: the paper's operator splitting."""
    quiet()
    warn_if_busy()
    places = parse_places(device)
    check_places(places, 1, 1)
    n_threads = threads or max(1, len(cpu_set()) // 2)
    kernels = Kernels(cache.type_k, cache.type_v, "on", n_threads)
    wanted = settings(Sizes(cache.ctx, ubatch=cache.ubatch), kernels, sequences.parallel)
    with progress_bar("measuring") as report:
        if places.on_gpus or no_plan:
            # Where the hot model's attention would be computed, too.
            of_hot = _costs(hot, [name for name in (places.hot, places.cold) if name], wanted, report)
            of_cold = _costs(cold, [name for name in (places.cold,) if name], wanted, report)
        else:
            choices = Choices(device=HOST, fixed_ubatch=cache.ubatch is not None)
            of_hot, of_cold = (_planned_costs(path, wanted, choices, report) for path in (hot, cold))
    load = sequences.load(of_hot.context.n_ctx)
    if places.cold:
        measured = estimate(of_hot, load, places.cold)
    else:
        measured = measure(guest_shape(of_hot)[0], load, of_hot.context)
    made = plan_weave(of_hot, of_cold, load, measured, n_threads, of_cold.context.n_ubatch)
    if output:
        made.save(output)
    if json:
        print(made.to_json(), end="")
        return
    out.print(render_weave(made, (hot.stem, cold.stem)))
    if output:
        more = f" --device {device}" if device else ""
        say(f"written to {output}; use it with `oallama serve --hot {hot} --cold {cold} --weave {output}{more}`")
