"""`oallama serve`: llama.cpp's own server, built from the patched source, obeying a plan."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from oallama.base.printing import say
from oallama.data.plan import HOST, PlacementPlan
from oallama.engine import runtime
from oallama.engine.load_settings import Settings
from oallama.engine.outline import pooling_of
from oallama.errors import OallamaError
from oallama.loading import autoplan, given_plan
from oallama.loading.autoplan import Choices
from oallama.loading.budgets import refuse_margin
from oallama.planning.heads import guesses_of
from oallama.serving.command import Draft, Heads
from oallama.serving.door import Address
from oallama.serving.model_config import read_model_config
from oallama.serving.serve_limits import Limits

from ..serving.hot_cold import HotCold, Unplanned, serve_hot_cold
from .drafts import plan_pair
from .groups import grouped
from .loading import make_plan, say_where
from .options import MODEL_HELP, Connection, Drafts, Hardware, Kernels, Placing, Sizes, settings
from .serve_on import Served, Where, serve_on
from .terminal import progress_bar


@dataclass(frozen=True)
class Guests:
    """Several models, and sequences of one in the memory of the others."""

    hot: Annotated[Path | None, typer.Option(help="In place of MODEL: the model with the most requests.")] = None
    cold: Annotated[
        list[Path] | None, typer.Option(help="A model with few, whose process computes for the hot one; repeatable.")
    ] = None
    guests: Annotated[
        int | None, typer.Option(min=0, help="Sequences of the hot model in cold ones' memory; default: --parallel.")
    ] = None
    lend: Annotated[str | None, typer.Option(help='Memory of each cold process for guests, like "2GiB".')] = None
    weave: Annotated[Path | None, typer.Option(help="Plan file of `oallama weave plan -o`.")] = None
    model_config: Annotated[
        Path | None,
        typer.Option(help="TOML file: ctx, parallel, threads, plan and others of single models."),
    ] = None
    deadline: Annotated[float, typer.Option(min=0.001, help="Seconds after which a guest's attention is lost.")] = 0.1


@dataclass(frozen=True)
class Door:
    """Where requests come in, and how many."""

    queue: Annotated[
        int, typer.Option(min=0, help="Requests of a model that may wait; more get 503 and Retry-After.")
    ] = Limits.queue
    drain: Annotated[
        float, typer.Option(min=0, help="Seconds that requests have to come to an end before the server does.")
    ] = Limits.drain_s
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1"
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = 8080


@grouped
def serve(
    context: typer.Context,
    model: Annotated[
        Path | None,
        typer.Argument(help=MODEL_HELP, show_default=False),
    ] = None,
    *,
    several: Guests,
    placing: Placing,
    hardware: Hardware,
    sizes: Sizes,
    parallel: Annotated[
        int | None, typer.Option(min=1, help="Requests served at once, each in its part of the context.")
    ] = None,
    kernels: Kernels,
    drafts: Drafts,
    door: Door,
) -> None:
    """Serve the OpenAI API with llama-server; arguments after -- go to it unchanged.

    With --hot and --cold: several models by name, each in a process of its own; on the CPU, unless --device says
    "hot=CUDA0,cold=CUDA1", or one device for all.
    """
    if several.hot is not None and model is not None and str(model).startswith("-"):
        model, context.args = None, [str(model), *context.args]  # the first argument after --
    limits = Limits(door.queue, door.drain)
    address = Address(door.host, door.port).changed_by(context.args)
    if several.hot is not None:
        of_one = {"--plan": placing.plan, "--vram": placing.vram, "--profile": hardware.profile, "--rpc": hardware.rpc}
        of_one |= {"--draft": drafts.draft}
        flags = {"--local-rpc": hardware.local_rpc, "--heads": drafts.heads}
        given = [name for name, value in (of_one | flags).items() if value]
        if model is not None or given:
            what = " and ".join(["MODEL"] * (model is not None) + given)
            raise OallamaError(f"--hot takes the place of MODEL and of what is for one model; leave out {what}")
        asked = (several.guests, several.lend, several.deadline, several.weave, hardware.device, hardware.margin)
        request = HotCold(several.hot, several.cold or [], limits, *asked)
        if not placing.makes_none(hardware.device or HOST):
            request = replace(request, planner=partial(_plan_for_cpu, placing, sizes))
        if several.model_config:
            names = [model.stem for model in request.models]
            request = replace(request, configs=read_model_config(several.model_config, names))
        address.check()
        raise typer.Exit(serve_hot_cold(request, settings(sizes, kernels, parallel or 4), address, context.args))
    if model is None or several.cold:
        raise OallamaError("give MODEL, or --hot MODEL with --cold MODEL")
    of_several = {"--guests": several.guests, "--lend": several.lend, "--weave": several.weave}
    of_several |= {"--model-config": several.model_config}
    if given := [name for name, value in of_several.items() if value is not None]:
        verb, what = ("is", "it") if len(given) == 1 else ("are", "them")
        raise OallamaError(f"{' and '.join(given)} {verb} for --hot MODEL with --cold MODEL; leave {what} out")
    runtime.program("llama-server")  # before minutes of profiling, as the next line
    address.check()
    connection = hardware.connect()
    pooling = pooling_of(model)
    made: PlacementPlan | None = None
    draft: Draft | Heads | None = None
    chosen = connection.device or autoplan.find_accelerator()
    unplanned = placing.makes_none(chosen or HOST)
    if unplanned and drafts.option:
        raise OallamaError(f"{drafts.option} needs a plan of model and guesses; leave out --no-plan")
    if placing.plan:
        if drafts.option:
            raise OallamaError(f"{drafts.option} plans model and guesses in one budget; leave out --plan")
        refuse_margin(hardware.margin)
        made = given_plan.load_plan(placing.plan)
        wanted = _planned_settings(made, sizes, parallel, kernels.threads)
        n = guesses_of(made)
        given_plan.check_plan(made, model, replace(wanted, heads="loaded" if n else ""))
        if pooling and made.context.n_outputs_max:
            raise OallamaError("the plan has no room for embeddings; make one with `oallama plan --all-logits`")
        draft = Heads(n) if n else None
    else:
        wanted = settings(sizes, kernels, parallel or 1)
        if pooling not in ("", "last"):  # llama-server computes a text in one micro-batch
            n_ctx = autoplan.resolve(wanted, autoplan.read_graph(model, wanted).n_ctx_train).n_ctx
            longest = n_ctx // wanted.n_seq_max
            sizes = replace(sizes, batch=sizes.batch or longest, ubatch=sizes.ubatch or longest)
            wanted = settings(sizes, kernels, parallel or 1)
        choices = replace(sizes.choices(), device=chosen, profile=hardware.profile, margin=hardware.margin)
        choices = replace(choices, all_logits=bool(pooling))
        if drafts.option:
            choices = replace(choices, device=chosen or HOST)
            made, draft = _with_guesses(model, drafts, placing, wanted, choices, connection)
        elif unplanned:
            refuse_margin(hardware.margin, "no plan is made")
        else:
            made = make_plan(model, placing, wanted, choices)
            say_where(made, chosen)
        if made:  # its micro-batch and form of attention may be others
            wanted = _planned_settings(made, sizes, parallel, kernels.threads)
    wanted = autoplan.resolve(wanted, autoplan.read_graph(model, wanted).n_ctx_train)
    served = Served(model, wanted, made, draft, connection.endpoints, pooling)
    where = Where(door.host, door.port, limits, context.args)
    if pooling:  # texts as long as before
        sizes = replace(sizes, batch=wanted.n_batch, ubatch=wanted.n_ubatch)
    flash_attn = wanted.flash_attn if placing.plan else kernels.flash_attn
    raise typer.Exit(serve_on(served, where, _plan_options(sizes, wanted, flash_attn, bool(pooling))))


def _plan_for_cpu(placing: Placing, sizes: Sizes, models: Sequence[Unplanned]) -> list[PlacementPlan]:
    """All are measured first: a plan is kept for the profile that it was made from, which the next one extends."""
    with progress_bar("measuring", announces=True) as report:
        for model, wanted, _ in models:
            with suppress(OallamaError):  # make_plan says what is wrong
                autoplan.profile_for(autoplan.read_graph(model, wanted), Choices(device=HOST), wanted, report)
    plans = []
    for of in models:
        say(f"{of.model.stem}: planning for the CPU (--no-plan: it runs as llama.cpp does by itself)")
        plans.append(make_plan(of.model, placing, of.settings, _choices_for_cpu(sizes, of)))
    return plans


def _choices_for_cpu(sizes: Sizes, of: Unplanned) -> Choices:
    choices, pooled = sizes.choices(), bool(pooling_of(of.model))
    return replace(
        choices,
        device=HOST,
        fixed_ubatch=choices.fixed_ubatch or "n_ubatch" in of.given or pooled,  # a text is computed in one
        fixed_batch=choices.fixed_batch or "n_batch" in of.given,
        all_logits=pooled,
    )


def _plan_options(sizes: Sizes, wanted: Settings, flash_attn: str, all_logits: bool) -> list[str]:
    """For `oallama plan`, as they hold for this model."""
    given = {"--batch": sizes.batch, "--ubatch": sizes.ubatch, "--flash-attn": flash_attn}
    options = [word for name, value in given.items() if value is not None for word in (name, str(value))]
    return options + ["--no-mmap"] * (wanted.use_mmap is False) + ["--all-logits"] * all_logits


def _with_guesses(
    model: Path, drafts: Drafts, placing: Placing, wanted: Settings, choices: Choices, connection: Connection
) -> tuple[PlacementPlan, Draft | Heads | None]:
    """The plan, and the draft or the heads where they are predicted to pay; says which."""
    joint = plan_pair(model, drafts, placing.vram, wanted, choices, connection, measures=placing.verify)
    say(joint.describe())
    if not joint.best.n:
        return joint.plan, None
    if joint.draft is None or joint.draft_plan is None:
        return joint.plan, Heads(joint.best.n)
    return joint.plan, Draft(joint.draft, joint.draft_plan, joint.best.n)


def _planned_settings(plan: PlacementPlan, sizes: Sizes, parallel: int | None, threads: int) -> Settings:
    """The plan's context settings with what was given instead; check_plan says whether that fits."""
    planned = plan.context
    return replace(
        Settings(**asdict(planned), n_threads=threads),
        n_ctx=planned.n_ctx if sizes.ctx is None else sizes.ctx,
        n_batch=sizes.batch or planned.n_batch,
        n_ubatch=sizes.ubatch or planned.n_ubatch,
        n_seq_max=parallel or planned.n_seq_max,
    )
