"""A plan that a user brings: read, and held against the model and the settings it is to be used with."""

from __future__ import annotations

from collections import deque
from pathlib import Path

from oallama.data.plan import PlacementPlan
from oallama.engine import device_list
from oallama.engine.load_settings import Settings
from oallama.engine.model_file import identity
from oallama.errors import OallamaError
from oallama.loading.autoplan import PathOrText, read_graph, resolve
from oallama.planning.heads import guesses_of

_OURS: deque[tuple[PlacementPlan, tuple[object, ...]]] = deque(maxlen=4)


def ours(plan: PlacementPlan, path: PathOrText) -> PlacementPlan:
    """A plan that this process made or found for the file: `check_plan` need not read the model for it."""
    _OURS.append((plan, identity(path)))
    return plan


def check_settings(plan: PlacementPlan, settings: Settings) -> None:
    """Raises OallamaError when a context with these settings would need more memory than the plan counted."""
    planned = plan.context
    for name in ("n_ctx", "n_batch", "n_ubatch", "n_seq_max"):
        asked, limit = getattr(settings, name), getattr(planned, name)
        if asked > limit:
            raise OallamaError(f"the plan is for {name} up to {limit}, asked for {asked}; make a new plan for {asked}")
    for name in ("type_k", "type_v", "flash_attn"):
        asked, limit = getattr(settings, name), getattr(planned, name)
        if asked != limit:
            raise OallamaError(f"the plan is for {name} {limit}, asked for {asked}; make a new plan for {asked}")


def check_plan(plan: PlacementPlan, path: PathOrText, settings: Settings) -> None:
    """Raises OallamaError unless the plan is for this model, this machine and a context of at least this size.

    A plan with MTP heads is for settings that load them.
    """
    if guesses_of(plan) and not settings.heads:
        raise OallamaError(
            "the plan is for a model and its MTP heads, which guess in `oallama serve` alone; make one without --heads"
        )
    n_ctx_train = 0
    if not settings.n_ctx or not any(plan is made and file == identity(path) for made, file in _OURS):
        graph = read_graph(path, settings)
        plan.check_model(graph.model)
        n_ctx_train = graph.n_ctx_train
    plan.check_devices(d.name for d in device_list.devices())
    check_settings(plan, resolve(settings, n_ctx_train))


def load_plan(source: PlacementPlan | PathOrText) -> PlacementPlan:
    """A plan, or the plan in a file."""
    return source if isinstance(source, PlacementPlan) else PlacementPlan.load(Path(source))
