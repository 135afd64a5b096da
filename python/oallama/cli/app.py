"""The `oallama` program: its commands, and how errors end it."""

from __future__ import annotations

import sys
from typing import Any

import typer
from typer.core import TyperGroup

from oallama.base.environment import DEBUG
from oallama.engine.model_hub import HUB_NAME, PREFIX, hub_model
from oallama.errors import OallamaError

from . import (
    INTERRUPTED,
    bench,
    bench_serve,
    chat,
    cluster,
    compare_models,
    demo,
    devices,
    doctor,
    history,
    make_model,
    plan,
    profile,
    quantize,
    quantize_search,
    run,
    serve,
    top,
    trace,
    tune,
    version,
    weave,
)
from .config import giving_way

USER_ERROR = 2


class _Group(TyperGroup):
    """Turns a user's mistake into one line and exit code 2, Ctrl-C into exit code 130.

    A command's name may have two words: `bench serve` comes before `bench` with an argument. `--hf NAME` stands for a
    model's file in every command. Defaults of the user's file give way to options that exclude them.
    """

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        two_words = " ".join(args[:2])
        name, command, rest = super().resolve_command(
            ctx, [two_words, *args[2:]] if two_words in self.commands else args
        )
        if ctx.resilient_parsing or "--help" in rest:  # completion
            return name, command, rest
        if ctx.default_map and name in ctx.default_map:
            ctx.default_map = {**ctx.default_map, name: giving_way(ctx.default_map[name], rest)}
        return name, command, with_hub_models(rest)

    def invoke(self, ctx: Any) -> Any:
        if DEBUG.get():
            return super().invoke(ctx)
        try:
            return super().invoke(ctx)
        except OallamaError as error:
            print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
            raise typer.Exit(USER_ERROR) from None
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None


def with_hub_models(args: list[str]) -> list[str]:
    """`--hf NAME`, `--hf=NAME` and `hf:OWNER/REPO..` as the downloaded file; what follows `--` stays."""
    found: list[str] = []
    rest = iter(args)
    for arg in rest:
        if arg == "--":
            return [*found, arg, *rest]
        if arg == "--hf":
            arg = PREFIX + next(rest, "")
        elif arg.startswith("--hf="):
            arg = PREFIX + arg.removeprefix("--hf=")
        elif not HUB_NAME.fullmatch(arg):
            found.append(arg)
            continue
        found.append(str(hub_model(arg)))
    return found


app = typer.Typer(
    cls=_Group,
    name="oallama",
    help="llama.cpp with a measured decision about where every tensor of a model lives.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.command("demo")(demo.demo)
app.callback()(version.before_all)
app.command("devices")(devices.devices)
app.command("doctor")(doctor.doctor)
app.command("make-model")(make_model.make)
app.command("quantize")(quantize.quantize)
app.command("quantize search")(quantize_search.search)
app.command("compare-models")(compare_models.compare_models)
app.command("profile")(profile.profile)
app.command("tune")(tune.tune_command)
app.command("history")(history.history)
app.command("plan")(plan.plan)
app.command("run")(run.run)
app.command("chat")(chat.chat)
app.command("bench")(bench.bench)
app.command("bench serve")(bench_serve.bench_serve)
app.command("trace")(trace.trace)
app.add_typer(cluster.app, name="cluster")
app.add_typer(weave.app, name="weave")
app.command("top")(top.top)
app.command("serve", context_settings={"allow_extra_args": True})(serve.serve)
