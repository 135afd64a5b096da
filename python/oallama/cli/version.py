"""What `oallama` does before any command: `--version`, and the defaults of the user's file."""

from __future__ import annotations

from typing import Annotated

import typer

from oallama.doctor import installed
from oallama.engine.runtime import quiet

from .config import default_map


def show(wanted: bool) -> None:
    if wanted:
        quiet()
        print(installed.version())
        print(f"backends: {', '.join(installed.backends())}; CPU kernels: {installed.kernels().found}")
        raise typer.Exit


def before_all(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=show, is_eager=True, help="Versions, backends, kernels.")
    ] = False,
) -> None:
    """llama.cpp with a measured decision about where every tensor of a model lives."""
    context.default_map = default_map(context.command)
