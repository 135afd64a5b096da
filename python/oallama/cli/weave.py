"""`oallama weave`: what a hot model's guests cost, and what they wait for, in a cold model's process."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from oallama.base.printing import say
from oallama.engine.runtime import quiet
from oallama.loading import autoplan
from oallama.planning.cost import CostModel
from oallama.profiling.fingerprint import cpu_set
from oallama.profiling.profiler import profile_machine
from oallama.profiling.workload import depths_for
from oallama.views.weave import render_weave
from oallama.weave.gpus import check_places, parse_places
from oallama.weave.plan import Load, estimate, guest_shape, measure
from oallama.weave.plan import plan as plan_weave

from .groups import grouped
from .options import Ctx, Json, Kernels, Sizes, TypeK, TypeV, Ubatch, settings
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
    wanted = settings(Sizes(cache.ctx, ubatch=cache.ubatch), Kernels(cache.type_k, cache.type_v, "on", n_threads))
    costs = []
    with progress_bar("measuring") as report:
        for path, own in ((hot, places.hot), (cold, places.cold)):
            graph = autoplan.read_graph(path, wanted)
            resolved = autoplan.resolve(wanted, graph.n_ctx_train)
            depths = depths_for(resolved.n_ctx)
            # Where the hot model's attention would be computed, too.
            names = list(dict.fromkeys(name for name in (own, places.cold) if name))
            profile = profile_machine(
                graph,
                names,
                n_threads=n_threads,
                depths=depths,
                type_k=cache.type_k,
                type_v=cache.type_v,
                progress=report,
            )
            costs.append(CostModel(graph, profile, names, autoplan.context_of(resolved)))
    of_hot, of_cold = costs
    load = sequences.load(of_hot.context.n_ctx)
    if places.cold:
        measured = estimate(of_hot, load, places.cold)
    else:
        measured = measure(guest_shape(of_hot)[0], load, cache.type_k, cache.type_v)
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
