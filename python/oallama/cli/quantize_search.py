"""`oallama quantize search`: the types that lose least within bytes and seconds."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from oallama.base.printing import print_json, seconds
from oallama.engine.runtime import quiet
from oallama.errors import OallamaError
from oallama.loading.autoplan import Choices
from oallama.planning import format_bytes, parse_budget
from oallama.quantizing import (
    DEFAULT_TYPES,
    GROUPINGS,
    Laboratory,
    Machine,
    Reference,
    Search,
    Trial,
    measure_importance,
)
from oallama.views.frontier_plot import write_frontier
from oallama.views.style import table

from .compare_models import Chunks, GpuLayers, Text, read_text
from .groups import grouped
from .options import Ctx, Hardware, Json, Kernels, Model, Sizes, Threads, Vram, settings
from .quantize import Imatrix, Requantize
from .terminal import out, progress_bar


@dataclass(frozen=True)
class Wanted:
    """What the best recipe must keep to, and what is proposed."""

    bytes: Annotated[
        list[str] | None, typer.Option(help='Most bytes of the file, "5GiB"; repeatable; default: as uniform types.')
    ] = None
    tpot: Annotated[float | None, typer.Option(min=0, help="Most predicted seconds per token of the best.")] = None
    points: Annotated[int, typer.Option(min=0, help="Proposals between fastest and best, with predictions.")] = 6
    types: Annotated[str, typer.Option(help="Types to choose from.")] = ",".join(DEFAULT_TYPES)
    group: Annotated[str, typer.Option(help=f"Tensors of one type: {', '.join(GROUPINGS)} (of the layers).")] = "third"


@dataclass(frozen=True)
class Scored:
    """How a trial is measured."""

    chunk: Annotated[int, typer.Option(min=4, help="Tokens of a chunk of the text; its second half is scored.")] = 512
    chunks: Chunks = None
    gpu_layers: GpuLayers = -1
    imatrix: Imatrix = None
    requantize: Requantize = False


@dataclass(frozen=True)
class Predicted:
    """For which memory seconds are predicted."""

    vram: Vram = None
    cpu: Annotated[bool, typer.Option("--cpu", help="Predict seconds on the CPU alone.")] = False


@dataclass(frozen=True)
class Shown:
    """What is drawn and printed."""

    plot: Annotated[Path | None, typer.Option(help="Draw the trials to this PNG.")] = None
    json: Json = False


@grouped
def search(
    model: Model,
    text: Text,
    *,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write the best recipe to this file.")] = None,
    wanted: Wanted,
    predicted: Predicted,
    scored: Scored,
    hardware: Hardware,
    elsewhere: Annotated[bool, typer.Option("--elsewhere", help="Plan for the machine of the profile.")] = False,
    ctx: Ctx = None,
    threads: Threads = 0,
    shown: Shown,
) -> None:
    """Search a type for every tensor, by the KL divergence that each costs on a text."""
    if predicted.cpu and predicted.vram is not None:
        raise OallamaError("--cpu is for no accelerator; leave it out with --vram")
    content = read_text(text)
    budgets = [_bytes(text) for text in wanted.bytes or ()]
    machine = None
    quiet()
    if predicted.vram is not None or predicted.cpu:
        connection = hardware.connect(elsewhere)
        device = connection.device or hardware.device
        choices = Choices(device=device, profile=hardware.profile, elsewhere=elsewhere, margin=hardware.margin)
        machine = Machine(model, predicted.vram, settings(Sizes(ctx), Kernels(threads=threads)), choices)
    with progress_bar("measuring") as report:
        lab = Laboratory(
            model,
            Reference(model, content, scored.chunk, scored.chunks, scored.gpu_layers, threads),
            imatrix=scored.imatrix,
            requantize=scored.requantize,
        )
        importance = measure_importance(lab, wanted.types.split(","), wanted.group, report)
    with progress_bar("trying") as report:
        found = Search(lab, importance, machine, report)
        found.run(budgets, wanted.points)
    best = found.best(max(budgets, default=np.inf), np.inf if wanted.tpot is None else wanted.tpot)
    if output:
        best.recipe.save(output, notes_of(best))
    if shown.plot:
        write_frontier(found.trials, shown.plot, f"{model.name} on {text.name}")
    if shown.json:
        print_json([{"name": t.name, "kind": t.kind, **notes_of(t), "best": t is best} for t in found.trials])
        return
    _show(found, best)
    if output:
        out.print(f"written to {output}", soft_wrap=True)


def notes_of(trial: Trial) -> dict[str, object]:
    """What was measured of a trial, for programs."""
    d = trial.divergence
    return {
        "file_bytes": trial.file_bytes,
        "bits_per_weight": d.bits_per_weight,
        "kld": d.kld,
        "kld_error": d.kld_error,
        "kld_expected": trial.expected,
        "perplexity": d.perplexity,
        "reference_perplexity": d.reference_perplexity,
        "same_top": d.same_top,
        "tpot_s": trial.tpot_s,
    }


def _bytes(text: str) -> int:
    budget = parse_budget(text, weights_bytes=0, free_bytes=1)
    if budget.bytes_total is None or budget.text == "auto":
        raise OallamaError(f"--bytes expects bytes such as 5GiB, got {text!r}")
    return budget.bytes_total


def _show(found: Search, best: Trial) -> None:
    front = {id(trial) for trial in found.front()}
    shown = table("the best is marked with >, what no other beats with *")
    shown.add_column("types")
    for column in ("size", "bits", "TPOT", "KL divergence", "sum of parts", "perplexity", "same top"):
        shown.add_column(column, justify="right")
    for trial in sorted(found.trials, key=lambda t: t.file_bytes):
        mark = ">" if trial is best else "*" if id(trial) in front else " "
        d = trial.divergence
        shown.add_row(
            f"{mark} {trial.name}",
            format_bytes(trial.file_bytes),
            f"{d.bits_per_weight:.2f}",
            seconds(trial.tpot_s),
            f"{d.kld:.5f}",
            f"{trial.expected:.5f}",
            f"{d.perplexity:.3f}",
            f"{d.same_top:.1%}",
        )
    out.print(shown)
