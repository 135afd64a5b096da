"""`oallama trace`: one prefill and a few decode steps as a timeline."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from oallama.base.printing import print_json
from oallama.engine import native
from oallama.planning import format_bytes
from oallama.tracing import record_timeline

from .groups import grouped
from .loading import Source, open_llama
from .options import Hardware, Json, Kernels, Model, Placing, Sizes
from .terminal import out, warn_if_busy


@grouped
def trace(
    model: Model,
    *,
    placing: Placing,
    hardware: Hardware,
    sizes: Sizes,
    kernels: Kernels,
    n_prompt: Annotated[int, typer.Option(min=1, help="Prompt tokens.")] = 512,
    n_generate: Annotated[int, typer.Option("--n-generate", "-n", min=0, help="Decode steps.")] = 4,
    output: Annotated[
        Path | None, typer.Option("--out", "-o", help="Write a trace for chrome://tracing or ui.perfetto.dev.")
    ] = None,
    picture: Annotated[Path | None, typer.Option(help="Draw it, too, as a PNG (needs matplotlib).")] = None,
    json: Json = False,
) -> None:
    """Record what devices and links do in one request; shows overlap, GB/s and idle time."""
    warn_if_busy()
    llm = open_llama(Source(model, placing, hardware, sizes, kernels))
    timeline = record_timeline(llm, n_prompt, n_generate)
    lanes = native.core().stream_lanes()
    written = []
    if output:
        timeline.save(output)
        written.append(output)
    if picture:
        from oallama.views.timeline_plot import write_picture

        title = f"{model.name}, {n_prompt} prompt tokens, {n_generate} decode steps"
        written.append(write_picture(timeline, picture, title))
    if json:
        print_json({"written": [str(path) for path in written], "lanes": timeline.summary(), "streams": lanes})
        return
    out.print(timeline)
    for lane in lanes:
        note = f" ({lane['note']})" if lane["note"] else ""
        out.print(
            f"weights to {lane['device']}: {format_bytes(lane['slots_nbytes'])} of slots, "
            f"{format_bytes(lane['pinned_nbytes'])} kept in pinned memory{note}",
            soft_wrap=True,
        )
    if written:
        out.print(f"written: {', '.join(map(str, written))}", soft_wrap=True)
