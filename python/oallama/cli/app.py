"""The `oallama` program: its commands, and how errors end it."""

from __future__ import annotations

import sys
from typing import Any

import typer
from typer.core import TyperGroup

from oallama.base.environment import DEBUG
from oallama.engine.model_hub import PREFIX
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
    trace,
    tune,
    version,
    weave,
)

USER_ERROR = 2


class _Group(TyperGroup):
    """Turns a user's mistake into one line and exit code 2, Ctrl-C into exit code 130.

    A command's name may have two words: `bench serve` comes before `bench` with an argument. `--hf NAME` stands for a
    model's file in every command.
    """

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        two_words = " ".join(args[:2])
        args = with_hub_models(args)
        return super().resolve_command(ctx, [two_words, *args[2:]] if two_words in self.commands else args)

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
    """`--hf NAME` and `--hf=NAME` as the argument `hf:NAME`; what follows `--` stays."""
    found: list[str] = []
    rest = iter(args)
    for arg in rest:
        if arg == "--":
            return [*found, arg, *rest]
        if arg == "--hf":
            arg = PREFIX + next(rest, "")
        elif arg.startswith("--hf="):
            arg = PREFIX + arg.removeprefix("--hf=")
        found.append(arg)
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
app.command("serve", context_settings={"allow_extra_args": True})(serve.serve)
