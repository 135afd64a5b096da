"""The exact planner: the fastest placement within the budget that the cost model knows, with a proven gap."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np

from .drafts import Drafts
from .fitting import Choice, Fitted, fit
from .layered import Infeasible
from .segments import Segments
from .solve import lower_bound, solve
from .space import Space, too_small
from .stage import Mask, Placement


def exact(space: Space) -> tuple[Drafts, Fitted]:
    """The best plan over the forms of attention, both ways of uploading and smaller micro-batches.

    Forms and uploads are compared at the requested micro-batch; the better pair is then tried with smaller ones until
    that stops paying. Raises BudgetTooSmall when nothing fits, NotLayered when the model has no layers one after the
    other.
    """
    kv_bytes, (size, *smaller) = _kv_bytes(space), space.sizes()
    pairs = [
        _Exact(space, space.drafts(replace(space.ours, flash_attn=form, n_ubatch=size)), upload, kv_bytes)
        for form in space.forms()
        for upload in (False, True)
    ]
    pairs = sorted((p for p in pairs if p.uploads == bool(p.mask.any())), key=lambda p: p.bound)
    best, solved = pairs[0], pairs[:1]
    for pair in pairs[1:]:
        if pair.bound < best.seconds:
            solved.append(pair)
            best = min(best, pair, key=lambda p: p.seconds)
    for size in smaller:
        if best.leaves_nothing:
            break
        context = replace(best.drafts.costs.context, n_ubatch=size)
        finer = _Exact(space, space.drafts(context), best.uploads, kv_bytes)
        if np.isfinite(best.seconds) and (finer.bound >= best.seconds or finer.seconds >= best.seconds):
            break
        solved.append(finer)
        best = min(best, finer, key=lambda p: p.seconds)
    unsolved = [p for p in pairs if p not in solved]
    for candidate in [*sorted(solved, key=lambda p: p.seconds), *unsolved]:
        drafts, smallest = candidate.drafts, int(candidate.drafts.costs.nbytes.min())
        found = fit(drafts, candidate.choose, candidate.charge, smallest)
        # Little on a device may need smaller buffers there than everything on it does.
        found = found or fit(drafts, candidate.choose, candidate.least_charge, smallest)
        if found is not None:
            return drafts, found
    drafts = space.drafts(space.ours)
    raise too_small(drafts, drafts.measure(drafts.by_placement(drafts.uniform(1, drafts.uniform(0).targets))))


def _kv_bytes(space: Space) -> list[int]:
    """KV cache by layer: the dry run's total, shared out by the values that the layers' attention stores.

    Zeros where it comes on top of the budget. Neither attention's form nor the micro-batch changes it.
    """
    drafts = space.drafts(space.ours)
    graph, names = drafts.costs.graph, drafts.accelerators
    if not names or drafts.budgets[names[0]].bytes_total is None:
        return [0] * graph.n_layer
    whole = space.whole(drafts, 1, np.zeros(len(drafts.costs.targets), dtype=bool))
    total = sum(m.kv for m in whole.memory.values())
    values = [s.n_head_kv * (s.head_dim_k + s.head_dim_v) if s else 0 for s in graph.attention]
    return [-(-total * v // max(1, sum(values))) for v in values]


class _Exact:
    """The exact choice for one context, with or without uploads of weights that live on the host.

    bound: seconds it cannot be below, whatever its compute buffers take. seconds: of the choice before its dry run,
    infinite when there is none.
    """

    def __init__(self, space: Space, drafts: Drafts, uploads: bool, kv_bytes: Sequence[int]) -> None:
        self.space, self.drafts, self.uploads, self.kv_bytes = space, drafts, uploads, kv_bytes
        targets = len(drafts.costs.targets)
        self.mask: Mask = drafts.costs.upload_pays(space.workload) if uploads else np.zeros(targets, dtype=bool)

    @cached_property
    def charge(self) -> list[int]:
        """Compute buffers of each accelerator, with everything on it."""
        return [
            self.space.whole(self.drafts, d, self.mask).on(name).compute if self._counts_kv(name) else 0
            for d, name in enumerate(self.drafts.accelerators, 1)
        ]

    @property
    def least_charge(self) -> list[int]:
        """Compute buffers of each accelerator, with KV cache and small weights on it but no target."""
        drafts, nothing = self.drafts, self.drafts.uniform(0).targets
        return [
            drafts.measure(drafts.by_placement(drafts.uniform(d, nothing))).on(name).compute
            if self._counts_kv(name)
            else 0
            for d, name in enumerate(drafts.accelerators, 1)
        ]

    @cached_property
    def bound(self) -> float:
        return lower_bound(self.segments.instance(self.drafts.limits), time_limit_s=self.space.time_limit_s)

    @cached_property
    def _first(self) -> Choice | None:
        return self.choose([limit - c for limit, c in zip(self.drafts.limits, self.charge, strict=True)])

    @cached_property
    def seconds(self) -> float:
        if self._first is None:
            return float("inf")
        return self.drafts.predictor.request(self._first.placement, self.space.workload)

    @property
    def leaves_nothing(self) -> bool:
        """Whether no weight and no KV cache is on the host."""
        if self._first is None:
            return False
        placement = self._first.placement
        return bool((placement.targets > 0).all() and (placement.layers > 0).all())

    def _counts_kv(self, name: str) -> bool:
        return self.drafts.budgets[name].bytes_total is not None

    @cached_property
    def segments(self) -> Segments:
        return Segments(self.drafts.costs, self.space.workload, self.mask, self.kv_bytes)

    def choose(self, capacity: list[int]) -> Choice | None:
        if any(c < 0 for c in capacity):
            return None
        try:
            instance = self.segments.instance(capacity)
            found = solve(instance, gap=self.space.gap, time_limit_s=self.space.time_limit_s)
        except Infeasible:
            return None
        placement = self._elsewhere(self.segments.placement(found.ways.tolist(), self.drafts.uniform(0)))
        params = {
            "uploads": bool(placement.upload.any()),
            "bound_s": found.bound,
            "gap": found.gap,
            "solver": found.method,
            "status": found.status,
        }
        return Choice(placement, found.nbytes.tolist(), params)

    def _elsewhere(self, placement: Placement) -> Placement:
        """Small weights outside of all layers (rope factors): beside most KV caches."""
        costs = self.drafts.costs
        inside = {s for segment in self.segments.segments for s in segment.small}
        home = int(np.bincount(placement.layers).argmax())
        small = placement.small.copy()
        for i, name in enumerate(costs.small):
            if i not in inside and name not in self.drafts.host_only:
                small[i] = home
        return replace(placement, small=small)
