"""`oallama make-model`: a GGUF with random weights, for trying and measuring."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from oallama.errors import OallamaError
from oallama.modelmaker import ARCHITECTURES, FILE_TYPES, SHAPES, make_model
from oallama.planning import format_bytes

from .options import Json
from .terminal import out, print_json, progress_bar

_SHAPES = "; ".join(f"{arch}: {', '.join(shapes)}" for arch, shapes in SHAPES.items())


def make(
    path: Annotated[Path, typer.Argument(help="File to write.", show_default=False)],
    arch: Annotated[str | None, typer.Option(help=f"One of {', '.join(ARCHITECTURES)}; default: the shape's.")] = None,
    shape: Annotated[str, typer.Option(help=f"{_SHAPES}.")] = "tiny",
    type: Annotated[str, typer.Option(help=f"One of {', '.join(FILE_TYPES)}.")] = "F16",
    seed: Annotated[int, typer.Option(help="Non-negative integer; the same seed gives the same file.")] = 0,
    set: Annotated[
        list[str] | None, typer.Option(metavar="NAME=N", help="Change a hyper-parameter, e.g. n_layer=8; repeatable.")
    ] = None,
    json: Json = False,
) -> None:
    """Write a model with random weights and a real tokenizer."""
    with progress_bar(f"writing {path.name}") as report:
        make_model(
            path,
            arch=arch,
            shape=shape,
            file_type=type,
            seed=seed,
            overrides=dict(map(_setting, set or ())),
            progress=lambda done, total: report(done, total, f"{format_bytes(done)} of {format_bytes(total)}"),
        )
    size = path.stat().st_size
    if json:
        print_json({"path": str(path), "size_bytes": size})
    else:
        out.print(f"{path}: {format_bytes(size)}", soft_wrap=True)


def _setting(text: str) -> tuple[str, int]:
    name, _, value = text.partition("=")
    if not value.isdecimal():
        raise OallamaError(f"--set expects NAME=N, got {text!r}; for example --set n_layer=8")
    return name, int(value)
