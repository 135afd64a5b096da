"""`oallama quantize`: a model in the types of a recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from oallama.base.printing import print_json
from oallama.errors import OallamaError
from oallama.planning import format_bytes
from oallama.quantizing import Resolved, Rule, described, named, resolve
from oallama.quantizing import quantize as run
from oallama.views.style import table

from .options import Json, Threads
from .terminal import out, progress_bar

Tensors = Annotated[
    list[str] | None,
    typer.Option("--tensor", metavar="PATTERN=TYPE", help="Type of the tensors that a pattern fits; repeatable."),
]
Imatrix = Annotated[Path | None, typer.Option(help="Importance matrix of llama-imatrix.")]
Requantize = Annotated[bool, typer.Option("--requantize", help="Allow an input that is quantised already.")]
_SHOWN = 12


def quantize(
    model: Annotated[Path | None, typer.Argument(help="GGUF file, F16, BF16 or F32.", show_default=False)] = None,
    output: Annotated[Path | None, typer.Argument(help="File to write.", show_default=False)] = None,
    recipe: Annotated[str | None, typer.Option(help="A name of --list, or a recipe file.")] = None,
    tensor: Tensors = None,
    imatrix: Imatrix = None,
    requantize: Requantize = False,
    threads: Threads = 0,
    force: Annotated[bool, typer.Option("--force", help="Replace an output that exists.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be written.")] = False,
    list: Annotated[bool, typer.Option("--list", help="Show the recipes that have a name.")] = False,
    json: Json = False,
) -> None:
    """Quantise a model by a recipe, with llama.cpp's quantiser."""
    if list:
        _show_recipes(json)
        return
    if model is None or recipe is None or (output is None and not dry_run):
        raise OallamaError("expected MODEL OUTPUT --recipe NAME; `oallama quantize --list` shows the recipes")
    wanted = named(recipe).before(map(Rule.parse, tensor or ()))
    if dry_run:
        found = resolve(model, wanted, imatrix=imatrix, requantize=requantize)
    else:
        assert output is not None
        if output.exists() and not force:
            raise OallamaError(f"{output} exists; --force replaces it")
        with progress_bar(f"writing {output.name}") as report:
            found = run(
                model,
                output,
                wanted,
                imatrix=imatrix,
                requantize=requantize,
                n_threads=threads,
                progress=lambda done, total, what: report(done, total, what),
            )
    _show(found, None if dry_run else output, json)


def _show_recipes(json: bool) -> None:
    rows = described()
    if json:
        print_json([{"name": name, "kind": kind, "what": what} for name, kind, what in rows])
        return
    shown = table("recipes")
    for column in ("name", "of", "what"):
        shown.add_column(column)
    for row in rows:
        shown.add_row(*row)
    out.print(shown)
    out.print("The embedding and the output are matrices too. Names of types are llama.cpp's: q4_0 is not Q4_0.")


def _show(found: Resolved, output: Path | None, json: bool) -> None:
    size = output.stat().st_size if output else found.file_bytes
    if json:
        print_json(
            {
                "path": str(output) if output else None,
                "recipe": found.recipe.name,
                "size_bytes": size,
                "bits_per_weight": found.bits_per_weight,
                "tensors": found.types,
                "fallbacks": {t.name: {"wanted": t.wanted, "written": t.written} for t in found.fallbacks},
            }
        )
        return
    out.print(
        f"{output or 'dry run'}: {format_bytes(size)}, {found.bits_per_weight:.2f} bits per weight, {found.describe()}",
        soft_wrap=True,
    )
    _show_fallbacks(found)


def _show_fallbacks(found: Resolved) -> None:
    """What llama.cpp did not do as asked."""
    if not found.fallbacks:
        return
    out.print(f"{len(found.fallbacks)} tensors have rows that are no whole blocks of the type asked for:")
    for t in found.fallbacks[:_SHOWN]:
        out.print(f"  {t.name}: {t.written} instead of {t.wanted} (rows of {t.ne[0]})", soft_wrap=True)
    if (more := len(found.fallbacks) - _SHOWN) > 0:
        out.print(f"  and {more} more")
