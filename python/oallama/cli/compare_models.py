"""`oallama compare-models`: how far models are from a reference on a text."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from oallama.base.printing import print_json
from oallama.engine.runtime import quiet
from oallama.errors import OallamaError
from oallama.planning import format_bytes
from oallama.quantizing import Divergence, Reference
from oallama.views.style import table

from .options import Json, Threads
from .terminal import out, progress_bar

Text = Annotated[Path, typer.Option("--text", help="Text to predict; none that the model was trained on.")]
Chunk = Annotated[int, typer.Option("--ctx", min=4, help="Tokens of a chunk; its second half is scored.")]
Chunks = Annotated[int | None, typer.Option(min=1, help="Most chunks of the text to use; default: all.")]
GpuLayers = Annotated[int, typer.Option("--gpu-layers", help="Layers on the accelerator while measuring; -1: all.")]


def compare_models(
    reference: Annotated[Path, typer.Argument(help="GGUF file to compare with, F16 for one.", show_default=False)],
    models: Annotated[list[Path], typer.Argument(help="GGUF files of the same vocabulary.", show_default=False)],
    text: Text,
    ctx: Chunk = 512,
    chunks: Chunks = None,
    gpu_layers: GpuLayers = -1,
    threads: Threads = 0,
    json: Json = False,
) -> None:
    """Perplexity and KL divergence of models against a reference."""
    quiet()
    content = read_text(text)
    with progress_bar("scoring") as report:
        base = Reference(
            reference,
            content,
            ctx,
            chunks,
            gpu_layers,
            threads,
            lambda done, total: report(done, total, f"chunk {done + 1} of {total}"),
        )
        found = {model: base.compare(model) for model in models}
    if json:
        print_json([{"model": str(model), **asdict(divergence)} for model, divergence in found.items()])
    else:
        _show(reference, found)


def read_text(path: Path) -> str:
    """Raises OallamaError for a file that is missing or no text."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise OallamaError(f"{path} is not text in UTF-8") from None
    except OSError as error:
        raise OallamaError(f"cannot read {path}: {error.strerror}") from None


def _show(reference: Path, found: dict[Path, Divergence]) -> None:
    any_of_them = next(iter(found.values()))
    shown = table(
        f"against {reference.name}: perplexity {any_of_them.reference_perplexity:.4f}, {any_of_them.n_tokens} tokens"
    )
    shown.add_column("model")
    for column in ("size", "bits", "perplexity", "KL divergence", "same top"):
        shown.add_column(column, justify="right")
    for model, d in found.items():
        shown.add_row(
            model.name,
            format_bytes(d.file_bytes),
            f"{d.bits_per_weight:.2f}",
            f"{d.perplexity:.4f}",
            f"{d.kld:.5f} ± {d.kld_error:.5f}",
            f"{d.same_top:.1%}",
        )
    out.print(shown)
