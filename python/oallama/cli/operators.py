"""`oallama profile --operators`: what each kind of operator takes, and with --in-place how far that is off."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from oallama.base.printing import print_json
from oallama.data.plan import HOST
from oallama.data.profile import Profile
from oallama.engine.load_settings import Settings
from oallama.loading import autoplan
from oallama.planning import OperatorGraph
from oallama.planning.cost import CostModel
from oallama.planning.in_place import InPlace, compare_in_place
from oallama.planning.operator_kinds import operator_kinds
from oallama.tracing.operator_times import time_operators
from oallama.tracing.record import WARM_UP
from oallama.views.operator_kinds import render_in_place, render_kinds

from .loading import Source, open_llama
from .options import Hardware, Kernels, Placing, Sizes
from .terminal import out

REPEATS = 5
DEPTH = 512  # of decode in place


def show_operators(
    made: Profile, graph: OperatorGraph, settings: Settings, model: Path | None = None, json: bool = False
) -> None:
    """Print the kinds of operators in decode and prefill; with a model also their times in its own graphs.

    settings: resolved. model: a file to load on the CPU, on which its operators are timed in place.
    """
    accelerators = [device.name for device in made.devices if device.name != HOST]
    costs = CostModel(graph, made, accelerators, autoplan.context_of(settings))
    n_tokens = settings.n_ubatch
    passes = {"decode": operator_kinds(costs, 1, decode=True), "prefill": operator_kinds(costs, n_tokens)}
    titles = {"decode": "decode, one token", "prefill": f"prefill, {n_tokens} tokens"}
    if not json:
        for name, kinds in passes.items():
            out.print(render_kinds(titles[name], kinds))
    found: dict[str, list[InPlace]] = {}
    if model:
        half = settings.n_ctx // 2
        found = in_place(made, graph, settings, model, min(settings.n_ubatch, half), min(DEPTH, half))
    if not json:
        for name, rows in found.items():
            out.print(render_in_place(f"{name} in place, on the CPU alone", rows))
        return
    content: dict[str, Any] = {name: [asdict(kind) for kind in kinds] for name, kinds in passes.items()}
    if model:
        content["in_place"] = {
            name: [{**asdict(row), "error_percent": row.error_percent} for row in rows] for name, rows in found.items()
        }
    print_json({"n_prefill": n_tokens, **content})


def in_place(
    made: Profile, graph: OperatorGraph, settings: Settings, model: Path, n_prompt: int, depth: int
) -> dict[str, list[InPlace]]:
    """Kinds of operators in "decode", behind a depth, and in "prefill", of a prompt in an empty cache.

    Of the CPU: the timer sees no device that is not of this process, and a plan would decide what runs there.
    """
    costs = CostModel(graph, made, (), autoplan.context_of(settings))
    kernels = Kernels(settings.type_k, settings.type_v, settings.flash_attn, settings.n_threads)
    sizes = Sizes(settings.n_ctx, settings.n_batch, settings.n_ubatch)
    llm = open_llama(Source(model, Placing(no_plan=True), Hardware(device=HOST), sizes, kernels))
    try:
        prefill, decode = time_operators(llm, n_prompt, depth, REPEATS)
    finally:
        llm.close()
    return {
        "decode": compare_in_place(costs, decode, 1, depth + WARM_UP + REPEATS // 2, decode=True),
        "prefill": compare_in_place(costs, prefill, n_prompt, n_prompt, decode=False),
    }
