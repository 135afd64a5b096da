#!/usr/bin/env python3
"""The pictures of a plan in README.md: a 32B model on a 24 GB card, for the terminal and as a map.

.venv/bin/python scripts/plan_picture.py   # writes docs/pictures/plan- and map-qwq-32b-24gb.svg; needs the engine

The model is QwQ-32B's shape in a sparse file (no weight is stored), the machine a datasheet's, the plan that of `auto`.
Its times are predictions. It takes a minute on two busy cores.
"""

from __future__ import annotations

import io
import re
import tempfile
from pathlib import Path

from rich.console import Console

from oallama.engine.load_settings import Settings
from oallama.loading import autoplan
from oallama.loading.autoplan import Choices
from oallama.modelmaker import make_sparse_model
from oallama.planning.tensor_seconds import tensor_seconds
from oallama.profiling.datasheet import Datasheet, make_profile
from oallama.views.placement_map import placement_map
from oallama.views.placement_svg import placement_svg
from oallama.views.plan_table import plan_title, render_plan

PICTURES = Path(__file__).resolve().parents[1] / "docs" / "pictures"
PICTURE, MAP = PICTURES / "plan-qwq-32b-24gb.svg", PICTURES / "map-qwq-32b-24gb.svg"
SHAPE, FILE_TYPE, SHEET, BUDGET, CONTEXT = "qwq-32b", "Q4_K_M", "rtx4090-xeon4314", "22GiB", 32768
COMMAND = f"oallama plan {SHAPE}-{FILE_TYPE.lower()}.gguf --vram {BUDGET} --ctx {CONTEXT}"


def main() -> None:
    sheet = Datasheet.load(SHEET)
    with tempfile.TemporaryDirectory() as folder:
        path = make_sparse_model(Path(folder) / f"{SHAPE}.gguf", shape=SHAPE, file_type=FILE_TYPE)
        settings = Settings(n_ctx=CONTEXT, n_threads=sheet.cpu.cores)
        graph = autoplan.read_graph(path, settings)
        choices = Choices(profile=make_profile(graph, sheet), elsewhere=True)
        considered = autoplan.consider(path, graph, BUDGET, settings, choices)
    plan = considered.found.best
    times = tensor_seconds(considered.space, plan)
    console = Console(width=100, record=True, file=io.StringIO(), force_terminal=True)
    console.print(f"[bold]$ {COMMAND}[/bold]\n", highlight=False)
    console.print(render_plan(plan))
    PICTURES.mkdir(exist_ok=True)
    MAP.write_text(placement_svg(placement_map(plan, times), title=f"{plan_title(plan)}; {SHEET}, predicted"))
    picture = console.export_svg(title=f"{SHAPE} on {SHEET}, predicted", unique_id="plan")
    PICTURE.write_text(re.sub(r"127\.0\.0\.1:\d+", "127.0.0.1", picture))


if __name__ == "__main__":
    main()
