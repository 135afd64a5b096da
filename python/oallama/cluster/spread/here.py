"""This host alone: the plan that `oallama run` would make, and whether it has the memory."""

from __future__ import annotations

from oallama.data.budget import format_bytes
from oallama.data.curves import piecewise_linear
from oallama.data.plan import HOST, PlacementPlan
from oallama.data.predicted import predicted_times
from oallama.data.workload import Workload
from oallama.engine import native
from oallama.engine.load_settings import Settings
from oallama.errors import OallamaError
from oallama.loading.autoplan import Choices, PathOrText, Progress
from oallama.loading.start import plan_model

from ..allocation.candidates import Candidate
from ..allocation.passes import prompt_passes

NAME = "this host alone"


def plan_here(path: PathOrText, settings: Settings, request: Workload, progress: Progress | None) -> PlacementPlan:
    """The plan of this host for the request. It is kept: the next start finds it. Raises OallamaError."""
    return plan_model(path, None, settings, Choices(workload=request), progress)


def stay(
    path: PathOrText, settings: Settings, request: Workload, memory_bytes: int, progress: Progress | None
) -> Candidate:
    """This host alone.

    memory_bytes: that the model may take here; 0: all that is free.
    """
    try:
        plan = plan_here(path, settings, request, progress)
    except OallamaError as error:
        return Candidate(NAME, "here", why_not=str(error))
    limit = memory_bytes or native.core().host_memory()
    need = plan.predicted.devices[HOST].total
    if need > limit:
        missing = f"it takes {format_bytes(need)} of memory, and {format_bytes(limit)} are given"
        return Candidate(NAME, "here", why_not=missing)
    _, tpot = predicted_times(plan, request.n_prompt, request.n_generate, request.depth)
    if tpot is None:
        return Candidate(NAME, "here", why_not="its times are not predicted")
    return Candidate(NAME, "here", 1, _prompts_s(plan, request, settings.n_ubatch, tpot), tpot)


def _prompts_s(plan: PlacementPlan, request: Workload, n_ubatch: int, tpot_s: float) -> float:
    one_prompt = plan.predicted.request_s - (request.n_generate - 1) * tpot_s
    if request.n_parallel == 1 or request.n_prompt >= n_ubatch:
        return request.n_parallel * one_prompt
    ttft = sorted(plan.predicted.ttft_s.items())
    return sum(each.count * piecewise_linear(ttft, each.n_tokens) for each in prompt_passes(request, n_ubatch, 0))
