"""`oallama tune`: measure this machine's thresholds between kernels and layouts."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer
from rich.table import Table

from oallama.base.printing import print_json, seconds
from oallama.data.tuning import KINDS, Tuning, tuning_file
from oallama.engine.runtime import quiet
from oallama.profiling.recorder import cache_dir
from oallama.profiling.tuner import TYPES, tune
from oallama.views.style import table

from .options import Json, Threads
from .terminal import out, progress_bar, warn_if_busy


def tune_command(
    device: Annotated[str, typer.Option(help="The device: CPU or CUDA0, CUDA1, ..")] = "CPU",
    types: Annotated[str, typer.Option("--types", help="Weight types, with commas.")] = ",".join(TYPES),
    threads: Threads = 0,
    json: Json = False,
) -> None:
    """Measure from how many tokens on another kernel or layout of a weight is faster on a device.

    The table is kept in ~/.cache/oallama for this machine, driver, engine and number of threads; plans and loads find
    it there.
    """
    quiet()
    warn_if_busy()
    with progress_bar("tuning") as report:
        made = tune(device, types=[t.strip() for t in types.split(",")], n_threads=threads, progress=report)
    if json:
        print_json(asdict(made))
        return
    out.print(tuning_table(made))
    out.print(f"kept in {tuning_file(made.fingerprint, cache_dir())}", soft_wrap=True)


def tuning_table(made: Tuning) -> Table:
    """Per type: both ways' seconds at the fewest and the most tokens, and where one begins to win."""
    kind = made.crossovers[0].kind if made.crossovers else "repack"
    first, second = KINDS[kind]
    view = table(f"{made.device}: {first} against {second}")
    view.add_column("type", no_wrap=True)
    for column in (f"{first}, few tokens", second, f"{first}, many", second, "threshold"):
        view.add_column(column, justify="right")
    for c in made.crossovers:
        few, many = c.points[0], c.points[-1]
        text = f"{first} up to {c.threshold}" if kind == "mmvq" else f"{second} from {c.threshold}"
        view.add_row(c.type, *map(seconds, (*few[1:], *many[1:])), text if c.threshold else f"{first} always")
    return view
