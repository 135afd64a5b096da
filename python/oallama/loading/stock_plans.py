"""llama.cpp's own placements in the device bytes of a plan, to compare the plan with."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from oallama.base.printing import say
from oallama.data.plan import PlacementPlan
from oallama.engine.load_settings import Settings
from oallama.errors import OallamaError
from oallama.loading import autoplan
from oallama.loading.autoplan import Choices, Progress
from oallama.planning import OperatorGraph


def stock_plans(
    path: Path,
    graph: OperatorGraph,
    plan: PlacementPlan,
    budget: str,
    settings: Settings,
    choices: Choices,
    progress: Progress | None = None,
) -> dict[str, PlacementPlan]:
    """llama.cpp's layer split and its --fit in the device bytes of `plan`'s budget.

    `budget`: what to take when the plan uses the CPU alone, which has none. --fit is left out where it does the same or
    fails. `progress` hears of what the profile lacks and is measured. Raises OallamaError where no layer split fits.
    """
    own = next(iter(plan.budgets.values()), budget)
    if own != "auto":
        choices = replace(choices, margin=None)
    layers = autoplan.plan_graph(path, graph, own, settings, replace(choices, planner="layers"), progress)
    try:
        total = next(iter(layers.budgets.values()))
        fit = autoplan.plan_graph(path, graph, total, settings, replace(choices, planner="fit", margin=None))
    except OallamaError as error:
        say(f"llama.cpp's --fit is left out: {error}")
        return {"layers": layers}
    if fit.to_backend_map() == layers.to_backend_map():
        n = layers.planner["params"]["n_gpu_layers"]
        say(f"llama.cpp's --fit does the same as its layer split ({n} layers)")
        return {"layers": layers}
    return {"layers": layers, "fit": fit}
