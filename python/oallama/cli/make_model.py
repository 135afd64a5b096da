"""`oallama make-model`: a GGUF with random weights, for trying and measuring."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from oallama.base.printing import print_json
from oallama.errors import OallamaError
from oallama.modelmaker import ARCHITECTURES, FILE_TYPES, SHAPES, make_model, make_sparse_model
from oallama.planning import format_bytes

from .options import Json
from .terminal import out, progress_bar

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
    routing: Annotated[
        str | None,
        typer.Option(
            metavar="zipf:S[,locality:L]",
            help="Which experts a mixture uses: skew S from 0 to 4, locality L from 0 to 0.98; see docs/experts.md.",
        ),
    ] = None,
    sparse: Annotated[
        bool, typer.Option("--sparse", help="A hole in place of the weights, but for routers: for planning.")
    ] = False,
    json: Json = False,
) -> None:
    """Write a model with random weights and a real tokenizer."""
    if sparse:
        if arch or set or (seed and not routing):
            raise OallamaError("--sparse writes a published shape as it is: leave out --arch, --set and --seed")
        make_sparse_model(path, shape=shape, file_type=type, routing=routing, seed=seed)
    else:
        _make(path, arch, shape, type, seed, set or [], routing)
    size = path.stat().st_size
    if json:
        print_json({"path": str(path), "size_bytes": size})
    else:
        out.print(f"{path}: {format_bytes(size)}{', sparse' if sparse else ''}", soft_wrap=True)


def _make(
    path: Path, arch: str | None, shape: str, type: str, seed: int, settings: Sequence[str], routing: str | None
) -> None:
    with progress_bar(f"writing {path.name}") as report:
        make_model(
            path,
            arch=arch,
            shape=shape,
            file_type=type,
            seed=seed,
            overrides=dict(map(_setting, settings)),
            routing=routing,
            progress=lambda done, total: report(done, total, f"{format_bytes(done)} of {format_bytes(total)}"),
        )


def _setting(text: str) -> tuple[str, int]:
    name, _, value = text.partition("=")
    if not value.isdecimal():
        raise OallamaError(f"--set expects NAME=N, got {text!r}; for example --set n_layer=8")
    return name, int(value)
