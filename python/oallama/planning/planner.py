"""Makes PlacementPlans: every candidate that was asked for, fastest prediction first.

The candidates are llama.cpp's own placements (-ngl, --fit, --n-cpu-moe, --n-cpu-ffn, the CPU alone), OATO and the
exact planner. "auto" asks for all of them, so its plan is never predicted to be slower than what llama.cpp does by
itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Literal, get_args

import numpy as np

from ..data.budget import format_bytes
from ..data.plan import HOST, ContextSettings, PlacementPlan
from ..data.predicted import TIE
from ..data.workload import Workload
from ..errors import OallamaError
from .bounds import least_seconds
from .every_token import minimal, stream_all
from .exact import Exact, exact, first_proposals
from .fitting import Fitted
from .greedy import oato
from .largest import largest
from .longer_prompts import prepared
from .plan_builder import DryRunPlan, PlanBuilder
from .pool import pool_bytes
from .space import Space
from .stage import Division
from .stock import StockFlags, family
from .uncertainty import cannot_win, ranked, request_range

PlannerName = Literal[
    "auto",
    "exact",
    "divided",
    "experts",
    "slots",
    "oato",
    "layers",
    "fewer-layers",
    "fit",
    "cpu-moe",
    "cpu-ffn",
    "cpu",
    "all",
    "stream-all",
    "minimal",
    "cpu-moe-last",
    "cpu-ffn-last",
    "stock-cpu",
]
DEFAULT_WORKLOAD = Workload()
PLANNERS: tuple[str, ...] = get_args(PlannerName)
# Below this concurrency divided weights are computed one side after the other.
BESIDE = 0.05
# By "auto" where routing was traced: without a trace every expert is as likely, and "divided" does as well.
BY_TRACE = ("experts", "slots")
# Candidates that may stream weights, or are what others are measured against at first use.
ALWAYS = ("exact", "layers", "cpu", "stock-cpu")
# How the exact planner's others divide weights. They are skipped by their own bounds, at the requested micro-batch.
DIVISIONS: dict[str, Division] = {"divided": "values", "experts": "experts", "slots": "slots"}
ON_REQUEST = ("all", "stream-all", "minimal", "cpu-ffn-last")
# llama.cpp's CPU alone: with its own kernels "cpu" is the same, so it is made where that may have others.
STOCK_CPU = "stock-cpu"


@dataclass(frozen=True)
class Candidates:
    """Plans by planner name, the one to take first, and why the others could not be made.

    skipped: those that cannot come near the fastest, with the seconds that their request takes at least.
    """

    plans: Mapping[str, PlacementPlan]
    failed: Mapping[str, OallamaError]
    skipped: Mapping[str, float] = field(default_factory=dict)

    @property
    def best(self) -> PlacementPlan:
        return next(iter(self.plans.values()))


def make_plans(space: Space, planner: PlannerName = "auto") -> Candidates:
    """Every candidate of `planner` ("auto": all that apply), the one to take first.

    Planners: "exact", the fastest placement within the budget by the cost model, to a stated gap; "divided", with
    weights that accelerator and host compute at once (where the profile says that they can); "oato", Algorithm 1
    (paper=True: literally as published); "layers", stock `-ngl` with the most layers the budget admits;
    "fewer-layers", the `-ngl` up to that which is predicted to be fastest; "fit", llama.cpp's own --fit; "cpu-moe"
    and "cpu-ffn", the fewest layers of --n-cpu-moe / --n-cpu-ffn that fit; "cpu-moe-last", the last layers in place of
    the first; "experts", as "divided", a mixture's feed-forwards by the most used experts, and "slots", by experts that
    come and go (by "auto" with a routing trace); "cpu", no device; "stock-cpu", no device and llama.cpp's own kernels
    (by "auto" where "cpu" may have ours). Never chosen by "auto": "all", everything but the embedding on the device;
    "stream-all", the most layers that fit resident, all other weights streamed for every token (FlexGen's
    strategy); "minimal", all weights and KV caches on the host, streamed for every token through two slots;
    "cpu-ffn-last", the last layers in place of the first.

    Raises:
        BudgetTooSmall: when no plan that uses the accelerator fits; says the minimum.
        OallamaError: when the profile lacks a device or a type, when the KV cache fits no device, for unknown planners.
    """
    plans: dict[str, PlacementPlan] = {}

    @cache
    def proposals(name: str) -> list[Exact]:
        """Of a planner that divides weights, in the form of attention that is best for whole ones, if that is known."""
        whole = plans.get("exact")
        return first_proposals(space, DIVISIONS[name], whole.context if whole else None)

    makers = _makers(space, proposals)
    if planner != "auto" and planner not in makers:
        if planner in get_args(PlannerName):
            raise OallamaError(
                f"the planner {planner!r} does not apply to this model on these devices; those that do: "
                f"auto, {', '.join(makers)}"
            )
        raise OallamaError(f"unknown planner {planner!r}, expected one of {', '.join(get_args(PlannerName))}")
    if space.fraction is not None and not 0 < space.fraction <= 1:
        raise OallamaError(f"fraction must be above 0 and at most 1, got {space.fraction}")
    names: list[str] = [planner]
    if planner == "auto":
        left_out = set(ON_REQUEST)
        if not (space.expert_use and space.expert_use.from_trace):
            left_out.update(BY_TRACE)
        if not space.own_kernels:
            left_out.add(STOCK_CPU)
        names = [name for name in makers if name not in left_out]
    if not space.accelerators:
        names = [name for name in names if name in ("cpu", STOCK_CPU)] or ["cpu"]
    failed: dict[str, OallamaError] = {}
    skipped: dict[str, float] = {}
    may_skip = planner == "auto" and not space.all_candidates
    least = cache(lambda: least_seconds(space.builder(space.context), space.workload))
    for name in names:
        try:
            if may_skip and plans and name not in ALWAYS:
                bound = proposals(name)[0].bound if name in DIVISIONS else least()
                if cannot_win(bound, plans, space.noise) or (name in DIVISIONS and _slower_division(bound, plans)):
                    skipped[name] = bound
                    continue
            plans[name] = _checked(space, makers[name]())
        except OallamaError as error:
            failed[name] = error
    if not plans or ("exact" in failed and not any(_uses_accelerator(plan) for plan in plans.values())):
        # Nothing that uses the accelerator fits: a mistake to be told, not a reason to use the CPU.
        raise next(iter(failed.values()))
    chosen = {name: _with_range(space, plans[name]) for name in ranked(plans, space.noise)}
    return Candidates(chosen, failed, skipped)


def _slower_division(bound: float, plans: Mapping[str, PlacementPlan]) -> bool:
    """Whether a plan that divides weights takes no longer; noise is taken to do the same to all that divide."""
    return any(plans[name].predicted.request_s <= bound for name in DIVISIONS if name in plans)


def _with_range(space: Space, plan: PlacementPlan) -> PlacementPlan:
    expected = request_range(plan, space.doubted_noise)
    return replace(plan, predicted=replace(plan.predicted, range_s=expected))


def _uses_accelerator(plan: PlacementPlan) -> bool:
    return any(memory.total for name, memory in plan.predicted.devices.items() if name != HOST)


def _makers(space: Space, proposals: Callable[[str], Sequence[Exact]]) -> dict[str, Callable[[], PlacementPlan]]:
    """proposals: `first_proposals` of the planners that divide weights."""

    def dividing(name: str) -> Callable[[], PlacementPlan]:
        return lambda: _finish(space, name, exact(space, proposals(name)))

    best = cache(lambda: exact(space))
    makers: dict[str, Callable[[], PlacementPlan]] = {
        "exact": lambda: _finish(space, "exact", best()),
        "layers": lambda: _layers(space),
        "fewer-layers": lambda: _fewer_layers(space),
    }
    if len(space.accelerators) <= 1:
        makers["oato"] = lambda: _finish(space, "oato", oato(space))
        if space.accelerators and space.expert_use is not None:
            makers["experts"] = dividing("experts")
            if space.expert_use.slots is not None:
                makers["slots"] = dividing("slots")
        if _computes_beside(space):
            makers["divided"] = dividing("divided")
    if space.fit is not None:
        makers["fit"] = lambda: _fit(space)
    experts = any(op.op == "MUL_MAT_ID" for op in space.graph.targets(min(space.graph.tiers)))
    for name in ("cpu-moe", "cpu-moe-last") if experts else ("cpu-ffn", "cpu-ffn-last"):
        makers[name] = partial(_family, space, name)
    makers["cpu"] = lambda: _cpu(space)
    makers[STOCK_CPU] = lambda: _stock_cpu(space)
    makers["all"] = lambda: _all(space)
    makers["stream-all"] = lambda: stream_all(space)
    makers["minimal"] = lambda: minimal(space)
    return makers


def _computes_beside(space: Space) -> bool:
    """Whether the accelerator and the host compute at the same time, so that dividing weights by values can pay."""
    return bool(space.accelerators) and space.profile.concurrent(space.accelerators[0]) >= BESIDE


def _finish(space: Space, name: str, found: tuple[PlanBuilder, Fitted]) -> PlacementPlan:
    builder, fitted = found
    context = builder.costs.context
    dry_run, later = prepared(space, builder, fitted)
    used = {"n_ubatch": context.n_ubatch, "flash_attn": context.flash_attn, "attention": context.attention, **later}
    return builder.finish(dry_run, name, {**fitted.proposal.params, **used})


def _checked(space: Space, plan: PlacementPlan) -> PlacementPlan:
    """Raises OallamaError when the host cannot hold what the plan leaves to it beside the file's own pages."""
    host = plan.predicted.devices.get("CPU")
    physical = space.profile.device("CPU").memory_total
    if host and physical and (needed := host.kv + host.compute) > physical:
        raise OallamaError(
            f"KV cache and compute buffers need {format_bytes(needed)} of the host, which has "
            f"{format_bytes(physical)}, and no accelerator's budget holds them; lower n_ctx or quantise the KV cache"
        )
    return plan


# ---- llama.cpp's own placements ------------------------------------------------------------------------------------


def _cpu(space: Space) -> PlacementPlan:
    """No accelerator at all."""
    return _alone(space, "cpu", space.forms(), lambda builder: builder.by_homes(builder.uniform(0)))


def _stock_cpu(space: Space) -> PlacementPlan:
    """llama.cpp without an accelerator."""
    return _alone(space, STOCK_CPU, space.stock_forms(), lambda builder: builder.by_stock(StockFlags(0)))


def _alone(
    space: Space, name: str, forms: Sequence[ContextSettings], place: Callable[[PlanBuilder], PlacementPlan]
) -> PlacementPlan:
    """On the host, in the requested form of attention unless another is faster by more than TIE."""
    builders = [space.builder(context, host_only=True) for context in forms]
    found = [(builder, builder.dry_run(place(builder))) for builder in builders]
    fastest = min(dry_run.seconds for _, dry_run in found)
    builder, dry_run = next(f for f in found if f[1].seconds <= fastest * (1 + TIE))
    context = builder.costs.context
    return builder.finish(dry_run, name, {"flash_attn": context.flash_attn, "attention": context.attention})


def _all(space: Space) -> PlacementPlan:
    builder = space.builder(space.ours)
    full = builder.dry_run(builder.by_homes(builder.uniform(1)))
    if not builder.fits(full):
        raise OallamaError(
            f"the whole model does not fit the budget {builder.describe_budget()}: it needs "
            f"{builder.describe_need(full)}; raise the budget or take planner 'auto'"
        )
    return builder.finish(full, "all", {})


def _layers(space: Space) -> PlacementPlan:
    """The largest -ngl that fits, as people use it."""
    builder = space.builder(space.context)
    n, dry_run = _most_layers(builder)
    return builder.finish(dry_run, "layers", {"n_gpu_layers": n})


def _fewer_layers(space: Space) -> PlacementPlan:
    """The -ngl that is predicted to be fastest of all that fit."""
    builder = space.builder(space.context)
    flags = _split(builder)
    numbers = range(_most_layers(builder)[0], -1, -1)
    seconds = builder.predictor.requests([builder.stock(flags(n)) for n in numbers], space.workload)
    n = numbers[int(np.argmin(seconds))]
    return builder.finish(builder.dry_run(builder.by_stock(flags(n))), "fewer-layers", {"n_gpu_layers": n})


def _most_layers(builder: PlanBuilder) -> tuple[int, DryRunPlan]:
    flags = _split(builder)
    return _most_stock(builder, flags, builder.costs.graph.n_layer_all + 1)


def _split(builder: PlanBuilder) -> Callable[[int], StockFlags]:
    """-ngl as stock flags; several accelerators share the layers as their budgets are to each other."""
    return lambda n: StockFlags(n, tuple(float(limit) for limit in builder.limits))


def _fit(space: Space) -> PlacementPlan:
    assert space.fit is not None
    builder = space.builder(space.context)
    # --fit knows nothing of the pool, which is largest with everything on the device.
    limits = {}
    for device, (name, limit) in enumerate(zip(builder.accelerators, builder.limits, strict=True), 1):
        full = builder.by_homes(builder.uniform(device))
        limits[name] = max(0, limit - pool_bytes(builder.costs, full, name))
    flags = space.fit(limits)
    dry_run = builder.dry_run(builder.by_stock(flags))
    if not builder.fits(dry_run):
        raise OallamaError(
            f"llama.cpp's --fit gives {builder.describe_need(dry_run)}, over {builder.describe_budget()}"
        )
    params = {"n_gpu_layers": flags.n_gpu_layers, "overrides": [list(pair) for pair in flags.overrides]}
    return builder.finish(dry_run, "fit", params)


def _family(space: Space, name: str) -> PlacementPlan:
    """All layers on the devices but for the experts (feed-forwards) of the first (last) N, the smallest that fits."""
    builder = space.builder(space.context)
    n_layer = builder.costs.graph.n_layer
    flags = _split(builder)(-1)
    kept, dry_run = _most_stock(
        builder, lambda n: replace(flags, overrides=family(name, n_layer - n, n_layer)), n_layer
    )
    return builder.finish(dry_run, name, {"n": n_layer - kept})


def _most_stock(builder: PlanBuilder, flags: Callable[[int], StockFlags], most: int) -> tuple[int, DryRunPlan]:
    return largest(builder, lambda n: builder.by_stock(flags(n)), lambda n: builder.stock(flags(n)), most)
