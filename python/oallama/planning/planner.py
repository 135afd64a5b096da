"""Makes a PlacementPlan: by OATO, or one of the baselines it is judged against.

KV cache and compute buffers are charged to the budget first, from the engine's dry run; OATO fills the rest; the
result is dry-run again, because compute buffers depend on the placement, and corrected until it fits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from ..errors import OallamaError
from ..plan import HOST, ContextSettings, PlacementPlan
from ..profiling.profile import Profile
from .budget import Budget
from .cost import CostModel, Workload
from .drafts import Drafts, Measured, MemoryDryRun
from .oato import OatoResult, schedule
from .operators import OperatorGraph
from .predict import Predictor
from .stage import Mask

PlannerName = Literal["best", "oato", "layers", "cpu", "all"]
MAX_ROUNDS = 4
DEFAULT_WORKLOAD = Workload()


class BudgetTooSmall(OallamaError):
    """The budget cannot hold KV cache, compute buffers and norms; the message gives the minimum."""


def make_plan(
    graph: OperatorGraph,
    profile: Profile,
    *,
    devices: Sequence[str],
    budget: Budget,
    memory: MemoryDryRun,
    context: ContextSettings,
    planner: PlannerName = "oato",
    workload: Workload = DEFAULT_WORKLOAD,
    paper: bool = False,
    fraction: float | None = None,
) -> PlacementPlan:
    """Place every weight of a model.

    Args:
        devices: accelerator first (one for now); "CPU" may be listed, and alone gives the plan without an accelerator.
        budget: what the plan may use of the accelerator.
        memory: dry run of the engine, called with draft plans.
        context: context, batch and cache settings the plan is for.
        planner: "oato"; "layers", stock llama.cpp's `-ngl` with the most layers the same budget admits; "cpu", nothing
            on the device; "all", everything but the embedding on it; "best", whichever of oato, layers and cpu is
            predicted to be fastest.
        workload: the request to make fast.
        paper: OATO literally as published: decode times only, transfers as caused by the current plan, memory filled up
            to the first operator that does not fit, with operators too that the device does not speed up; no uploads.
        fraction: share of the memory left after KV cache and compute buffers that weights may take (Algorithm 1's 90 %
            rule). Default: 0.90 for budget "auto", where other programs share the device, and paper=True with
            bytes; 1.0 where the user said how much a plan may use, and for a share of the weights ("75%" is 75 %).

    Raises:
        BudgetTooSmall: when KV cache, compute buffers and norms alone exceed the budget; says the minimum.
        OallamaError: when the profile lacks a device or a type, and for unknown planners.
    """
    accelerators = [name for name in devices if name != HOST]
    if len(accelerators) > 1:
        raise OallamaError(f"plans use one accelerator, got {', '.join(accelerators)}; name one of them with --device")
    device = accelerators[0] if accelerators else None
    costs = CostModel(graph, profile, device, context)
    drafts = Drafts(costs, Predictor(costs), memory, budget, workload, device or HOST)
    if fraction is None:
        fraction = 0.90 if budget.is_auto or (paper and budget.bytes_total is not None) else 1.0
    if not 0 < fraction <= 1:
        raise OallamaError(f"fraction must be above 0 and at most 1, got {fraction}")
    makers: dict[str, Callable[[], PlacementPlan]] = {
        "oato": lambda: _oato(drafts, paper, fraction),
        "layers": lambda: _layers(drafts),
        "cpu": lambda: _cpu(drafts),
        "all": lambda: _all(drafts),
        "best": lambda: _best(drafts, paper, fraction),
    }
    if planner not in makers:
        raise OallamaError(f"unknown planner {planner!r}, expected one of {', '.join(makers)}")
    return makers["cpu" if device is None else planner]()


# ---- baselines -----------------------------------------------------------------------------------------------------


def _cpu(drafts: Drafts) -> PlacementPlan:
    return drafts.finish(drafts.measure(drafts.on_host()), "cpu", {})


def _all(drafts: Drafts) -> PlacementPlan:
    n = len(drafts.costs.targets)
    full = drafts.measure(drafts.by_target(np.ones(n, bool), np.zeros(n, bool)))
    if drafts.excess(full.on_device) > 0:
        raise OallamaError(
            f"the whole model does not fit the budget {drafts.budget.text} of {drafts.device}: it needs "
            f"{drafts.describe_need(full.on_device)}; raise the budget or take planner 'oato'"
        )
    return drafts.finish(full, "all", {})


def _layers(drafts: Drafts) -> PlacementPlan:
    """The largest -ngl whose dry run fits, by bisection (bytes grow with every layer)."""
    fits, low, high = drafts.measure(drafts.by_layer(0)), 0, drafts.costs.graph.n_layer + 1
    while low < high:
        middle = (low + high + 1) // 2
        found = drafts.measure(drafts.by_layer(middle))
        if drafts.excess(found.on_device) <= 0:
            fits, low = found, middle
        else:
            high = middle - 1
    if drafts.excess(fits.on_device) > 0:
        # Even without a layer upstream's op_offload needs device memory for the weights it uploads.
        raise _too_small(drafts, fits)
    return drafts.finish(fits, "layers", {"n_gpu_layers": low})


# ---- OATO ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Candidate:
    measured: Measured
    result: OatoResult
    seconds: float
    uploads: bool


def _oato(drafts: Drafts, paper: bool, fraction: float) -> PlacementPlan:
    costs = drafts.costs
    workload = Workload(0, drafts.workload.n_generate) if paper else drafts.workload
    nothing = np.zeros(len(costs.targets), dtype=bool)
    variants = [nothing]
    if not paper and (upload := costs.upload_pays(workload)).any():
        # Uploads speed prefill up but need device memory for the weights in flight: both ways are planned and compared.
        variants.insert(0, upload)
    fitted = [_Fitter(drafts, workload, upload, paper, fraction).fit() for upload in variants]
    candidates = [candidate for candidate in fitted if candidate is not None]
    if not candidates:
        raise _too_small(drafts, drafts.measure(drafts.by_target(nothing, nothing)))
    best = min(candidates, key=lambda c: c.seconds)
    params = {
        "paper": paper,
        "fraction": fraction,
        "uploads": best.uploads,
        "iterations": best.result.iterations,
        "stopped": best.result.reason,
    }
    return drafts.finish(best.measured, "oato", params)


def _too_small(drafts: Drafts, smallest: Measured) -> BudgetTooSmall:
    return BudgetTooSmall(
        f"the budget {drafts.budget.text} of {drafts.device} is too small for the KV cache, compute buffers and "
        f"norms: the minimum is {drafts.describe_need(smallest.on_device)}; raise the budget, lower n_ctx or n_ubatch, "
        "or quantise the KV cache"
    )


class _Fitter:
    """OATO under the budget for one choice of uploads."""

    def __init__(self, drafts: Drafts, workload: Workload, upload: Mask, paper: bool, fraction: float) -> None:
        self.drafts, self.workload, self.upload = drafts, workload, upload
        self.paper, self.fraction = paper, fraction
        costs = drafts.costs
        self.start = costs.placement(drafts.by_target(np.zeros(len(costs.targets), dtype=bool), upload))
        self.inputs = costs.oato_inputs(workload, self.start)

    def fit(self) -> _Candidate | None:
        """The fastest placement within the budget that MAX_ROUNDS dry runs find; None when nothing at all fits.

        The charge (KV cache, compute buffers, small weights) starts as the dry run's with everything on the device. A
        result over the budget raises it by the excess; one that needed less gives the room back if another tensor
        might use it.
        """
        drafts, nbytes = self.drafts, self.drafts.costs.nbytes
        every = np.ones(len(nbytes), dtype=bool)
        limit = drafts.budget.limit
        whole = drafts.measure(drafts.by_target(every, self.upload)).on_device
        charge = drafts.excess(whole) + limit - int(nbytes.sum())
        best: _Candidate | None = None
        for _ in range(MAX_ROUNDS):
            found = self._candidate(limit - charge)
            excess = drafts.excess(found.measured.on_device)
            chosen = found.result.on_device
            if excess > 0:
                if best is not None or not chosen.any():
                    break
                charge += excess
                continue
            if best is None or found.seconds < best.seconds:
                best = found
            needed = excess + limit - int(nbytes[chosen].sum())
            left = nbytes[~chosen]
            if not len(left) or charge - needed < left.min():
                break
            charge = needed
        if best is None:
            empty = self._candidate(0)
            best = empty if drafts.excess(empty.measured.on_device) <= 0 else None
        return best

    def _candidate(self, capacity: int) -> _Candidate:
        result = self._schedule(capacity)
        plan = self.drafts.by_target(result.on_device, self.upload, result.affinity.tolist())
        return _Candidate(self.drafts.measure(plan), result, self._seconds(result.on_device), bool(self.upload.any()))

    def _seconds(self, on_device: Mask) -> float:
        placement = replace(self.start, targets=on_device.astype(np.int8))
        return self.drafts.predictor.request(placement, self.workload)

    def _schedule(self, capacity: int) -> OatoResult:
        t_host, t_device, edges, anchors = self.inputs
        return schedule(
            t_host,
            t_device,
            self.drafts.costs.nbytes,
            capacity,
            edges=edges,
            anchors=anchors,
            fraction=self.fraction,
            fill="prefix" if self.paper else "skip",
            skip_negative=not self.paper,
            transfer="current" if self.paper else "marginal",
            predict=self._seconds,
        )


def _best(drafts: Drafts, paper: bool, fraction: float) -> PlacementPlan:
    """The fastest of three plans; a budget too small for one of them leaves the others."""
    plans = [_cpu(drafts)]
    with suppress(BudgetTooSmall):
        plans.insert(0, _layers(drafts))
    with suppress(BudgetTooSmall):
        plans.insert(0, _oato(drafts, paper, fraction))
    return min(plans, key=lambda plan: plan.predicted.request_s)


# ---- verdict -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Verdict:
    """Plans by predicted request time, fastest first, and one sentence that says so."""

    best: str
    seconds: Mapping[str, float]
    sentence: str

    def slowdown(self, name: str) -> float:
        """How many times longer than the best plan `name` is predicted to take (1.0 for the best)."""
        return self.seconds[name] / self.seconds[self.best] if self.seconds[self.best] > 0 else 1.0


def compare(plans: Mapping[str, PlacementPlan]) -> Verdict:
    """Which of several plans for one model and workload is predicted to be fastest, and by how much.

    `plans` maps a name to show ("oato", "CPU alone") to a plan. Plans within 1 % count as equal in the sentence. Raises
    OallamaError when there are none or their workloads differ.
    """
    if not plans:
        raise OallamaError("no plans to compare")
    if len({plan.predicted.workload for plan in plans.values()}) > 1:
        raise OallamaError("plans made for different workloads cannot be compared; make them with the same one")
    fastest_first = sorted(plans.items(), key=lambda item: item[1].predicted.request_s)
    seconds = {name: plan.predicted.request_s for name, plan in fastest_first}
    names = list(seconds)
    best = names[0]
    n_prompt, n_generate = plans[best].predicted.workload
    request = f"{n_prompt} + {n_generate} tokens"
    if len(names) == 1:
        return Verdict(best, seconds, f"{best} is predicted to take {seconds[best]:.3g} s for {request}")
    others = []
    for name in names[1:]:
        ratio = seconds[name] / seconds[best] if seconds[best] > 0 else 1.0
        others.append(f"as fast as {name}" if ratio < 1.01 else f"{ratio:.2f}x faster than {name}")
    sentence = f"{best} is predicted to be fastest for {request} ({seconds[best]:.3g} s): {', '.join(others)}"
    return Verdict(best, seconds, sentence)
