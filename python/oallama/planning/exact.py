"""The exact planner: the fastest placement within the budget that the cost model knows, with a proven gap.

With divided weights the shares of `layered_model.SHARES` are solved for, and what the budget then leaves is handed out
in single steps of them, so the bound is that of these shares.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from ..data.plan import ContextSettings
from ..data.workload import Workload
from ..solving.layered import Infeasible
from ..solving.solve import lower_bound, solve
from .cost import CostModel
from .divided import shares_of, topped_up
from .fitting import Fitted, Proposal, fit
from .layered_model import LayeredModel
from .plan_builder import HIDES, PlanBuilder
from .space import Space, too_small
from .stage import Division, Homes, Mask
from .streams import not_too_early, stream_pays, with_streams
from .uncertainty import extrapolation_doubt

# Weight of "copies take longer" against "all else takes longer" that streams are planned with. The plans of 0 to 1 are
# within a percent of each other; the end that fits gives a tighter bound.
PRICE = 0.5
# Compute buffers that take more of the budget than this decide themselves what is best.
TIGHT = 0.2


def exact(space: Space, first: Sequence[Exact] = ()) -> tuple[PlanBuilder, Fitted]:
    """The best plan over the forms of attention, what happens to host weights in prefill, and micro-batches.

    first: `first_proposals`; none: those of whole weights.

    Moves are compared at the requested micro-batch in the requested form of attention, the best with the other forms;
    that is then tried with smaller micro-batches, and with larger ones when it moves weights (which then move less
    often), until that stops paying. Where compute buffers take much of the budget, all moves are tried with all of
    them. Raises BudgetTooSmall when nothing fits, NotLayered when the model has no layers one after the other.
    """
    fitting: tuple[Exact, Fitted] | None = None
    for candidate in _candidates(space, list(first) or first_proposals(space)):
        # A dry run may find larger compute buffers than were counted, so that another is faster.
        if fitting is not None and _nine(candidate.seconds) + candidate.doubt >= _at_most(*fitting):
            continue
        found = candidate.fitted()
        if found is not None and (fitting is None or _at_most(candidate, found) < _at_most(*fitting)):
            fitting = candidate, found
    if fitting is not None:
        candidate, found = fitting
        return candidate.builder, candidate.finished(found)
    builder = space.builder(space.ours)
    raise too_small(builder, builder.dry_run(builder.by_homes(builder.uniform(1, builder.uniform(0).targets))))


def first_proposals(space: Space, divides: Division = "", like: ContextSettings | None = None) -> list[Exact]:
    """All moves at the requested micro-batch in the requested form of attention, the lowest bound first.

    divides: how weights may be divided between the one accelerator and the host. like: a context whose form of
    attention is the one to take.
    """
    forms = space.forms()
    if like is not None:
        forms = [form for form in forms if (form.flash_attn, form.attention) == (like.flash_attn, like.attention)]
    search = Search(space, divides, _kv_bytes(space), forms or space.forms())
    builder = search.builders()[0]
    pairs = [Exact(search, builder, moves) for moves in moves_to_try(space, builder.costs)]
    return sorted(pairs, key=lambda p: p.bound)


def _candidates(space: Space, pairs: list[Exact]) -> list[Exact]:
    """Contexts and moves that were solved, the fastest first, then those whose bounds are above it."""
    _, *smaller = space.sizes()
    _, *others = pairs[0].search.builders()
    best, solved = pairs[0], pairs[:1]

    def like_best(builder: PlanBuilder) -> Exact:
        return Exact(best.search, builder, best.moves.at(builder.costs, space.workload))

    def try_also(pair: Exact) -> None:
        nonlocal best
        if pair.bound < best.seconds + best.doubt:
            solved.append(pair)
            best = min(best, pair, key=_rank)

    for pair in pairs[1:]:
        try_also(pair)
    for builder in others:
        pairs.append(like_best(builder))
        try_also(pairs[-1])
    tight = any(c > TIGHT * limit for c, limit in zip(best.charge, best.builder.limits, strict=True))
    for sizes in (smaller, space.larger_sizes() if best.moves_something else []):
        for size in sizes:
            if best.leaves_nothing:
                break
            builder = space.builder(space.with_ubatch(best.builder.costs.context, size))
            if tight:
                for moves in moves_to_try(space, builder.costs):
                    pairs.append(Exact(best.search, builder, moves))
                    try_also(pairs[-1])
                continue
            other = like_best(builder)
            if np.isfinite(best.seconds) and (other.bound >= best.seconds + best.doubt or _rank(other) >= _rank(best)):
                break
            solved.append(other)
            best = min(best, other, key=_rank)
    return [*sorted(solved, key=_rank), *(p for p in pairs if p not in solved)]


def _at_most(candidate: Exact, found: Fitted) -> float:
    return _nine(found.dry_run.seconds) + candidate.doubt


def _rank(candidate: Exact) -> tuple[float, bool, bool]:
    """The fastest first; of those that take equally long what moves nothing, then what does not stream.

    A micro-batch whose times are extrapolated must be faster by more than they may be off.
    """
    moves = candidate.moves
    return _nine(candidate.seconds) + candidate.doubt, bool(moves.mask.any()), moves.streams


def _nine(seconds: float) -> float:
    """Nine digits of it: plans that differ by less take equally long."""
    return float(f"{seconds:.9g}")


def _kv_bytes(space: Space) -> list[int]:
    """KV cache by layer: the dry run's total, shared out by the values that the layers' attention stores.

    Zeros where it comes on top of the budget. Neither attention's form nor the micro-batch changes it.
    """
    builder = space.builder(space.ours)
    graph, names = builder.costs.graph, builder.accelerators
    if not names or builder.budgets[names[0]].bytes_total is None:
        return [0] * graph.n_layer
    whole = space.whole(builder, 1, np.zeros(len(builder.costs.targets), dtype=bool))
    total = sum(m.kv for m in whole.memory.values())
    values = [s.n_head_kv * (s.head_dim_k + s.head_dim_v) if s else 0 for s in graph.attention]
    return [-(-total * v // max(1, sum(values))) for v in values]


@dataclass(frozen=True)
class Moves:
    """Which targets are moved to an accelerator in prefill when they live on the host.

    price: None for uploads; for streams see LayeredModel.
    """

    mask: Mask
    price: float | None = None

    @property
    def streams(self) -> bool:
        return self.price is not None

    def at(self, costs: CostModel, workload: Workload) -> Moves:
        """The same kind of moves in another context, whose form of attention may read other weights."""
        if not self.mask.any():
            return replace(self, mask=np.zeros(len(costs.targets), dtype=bool))
        pays = stream_pays(costs, workload) if self.streams else costs.upload_pays(workload)
        return replace(self, mask=pays)


def moves_to_try(space: Space, costs: CostModel) -> list[Moves]:
    """None at all, llama.cpp's uploads, which need less memory, and streams, which hide; those that can pay.

    Streams that do not hide are no better than uploads where there are any.
    """
    found = [Moves(np.zeros(len(costs.targets), dtype=bool))]
    if (uploads := costs.upload_pays(space.workload)).any():
        found.append(Moves(uploads))
    hides = costs.overlap >= HIDES or not costs.uploader
    if space.streams and hides and (streams := stream_pays(costs, space.workload)).any():
        found.append(Moves(streams, PRICE))
    return found


@dataclass
class Search:
    """One search of the exact planner.

    kv_bytes: KV cache of each layer. forms: contexts with each form of attention to choose from. spent_s: that the
    solver computed. Contexts share the time limit, and each may take an eighth of it, should the others have taken all.
    """

    space: Space
    divides: Division
    kv_bytes: Sequence[int]
    forms: Sequence[ContextSettings]
    spent_s: float = 0.0

    def builders(self) -> list[PlanBuilder]:
        """For each form, at the requested micro-batch."""
        size = self.space.sizes()[0]
        return [self.space.builder(replace(form, n_ubatch=size)) for form in self.forms]

    @property
    def left_s(self) -> float:
        limit = self.space.time_limit_s
        return max(limit - self.spent_s, limit / 8)


class Exact:
    """The exact proposal for one context and one kind of moves.

    bound: seconds it cannot be below, whatever its compute buffers take. seconds: of the proposal before its dry run,
    infinite when there is none.
    """

    def __init__(self, search: Search, builder: PlanBuilder, moves: Moves) -> None:
        self.search, self.space, self.builder, self.moves = search, search.space, builder, moves
        self._chosen: dict[tuple[int, ...], Proposal | None] = {}

    @cached_property
    def charge(self) -> list[int]:
        """Compute buffers and pool of each accelerator, with everything on it."""
        return [
            self.space.whole(self.builder, d, self.moves.mask, self.moves.streams).on(name).working
            if self._counts_kv(name)
            else 0
            for d, name in enumerate(self.builder.accelerators, 1)
        ]

    @property
    def least_charge(self) -> list[int]:
        """Compute buffers and pool of each accelerator, with KV cache and small weights on it but no target."""
        builder, nothing = self.builder, self.builder.uniform(0).targets
        return [
            builder.dry_run(builder.by_homes(builder.uniform(d, nothing))).on(name).working
            if self._counts_kv(name)
            else 0
            for d, name in enumerate(builder.accelerators, 1)
        ]

    def fitted(self) -> Fitted | None:
        """The proposal within the budget by its dry runs."""
        smallest = int(self.builder.costs.nbytes.min())
        # Little on a device may need smaller buffers there than everything on it does.
        return fit(self.builder, self.choose, self.charge, smallest) or fit(
            self.builder, self.choose, self.least_charge, smallest
        )

    @cached_property
    def bound(self) -> float:
        return lower_bound(self.layered.instance(self.builder.limits), time_limit_s=self.space.time_limit_s)

    @cached_property
    def _first(self) -> Proposal | None:
        return self.choose([limit - c for limit, c in zip(self.builder.limits, self.charge, strict=True)])

    @cached_property
    def seconds(self) -> float:
        if self._first is None:
            return float("inf")
        return self.builder.predictor.request(self._first.homes, self.space.workload)

    @cached_property
    def doubt(self) -> float:
        """Seconds by which prompts may take longer, because their micro-batches are larger than any that was timed."""
        costs, seconds = self.builder.costs, 0.0
        if self._first is None or costs.context.n_ubatch <= costs.prefill_tier:
            return seconds
        for n, _ in self.space.workload.chunks(costs.context.n_ubatch):
            at = costs.stage(n)
            ids = at.graph.assign(self._first.homes, at.tokens, costs.uploader)
            matrices = float(at.seconds[ids, np.arange(len(ids))].sum())
            seconds += extrapolation_doubt(n, costs.prefill_tier) * matrices
        return seconds

    @property
    def leaves_nothing(self) -> bool:
        """Whether no weight and no KV cache is on the host."""
        if self._first is None:
            return False
        homes = self._first.homes
        return bool((homes.targets > 0).all() and (homes.layers > 0).all())

    @property
    def moves_something(self) -> bool:
        """Whether a weight that lives on the host is uploaded or streamed."""
        homes = None if self._first is None else self._first.homes
        return homes is not None and bool(homes.upload.any() or (homes.stream is not None and homes.stream.any()))

    def _counts_kv(self, name: str) -> bool:
        return self.builder.budgets[name].bytes_total is not None

    @cached_property
    def layered(self) -> LayeredModel:
        costs, moves = self.builder.costs, self.moves
        return LayeredModel(
            costs, self.space.workload, moves.mask, self.search.kv_bytes, moves.price, self.search.divides
        )

    def choose(self, capacity: list[int]) -> Proposal | None:
        """The proposal for so many bytes of each accelerator, None where none fits; solved once."""
        key = tuple(capacity)
        if key not in self._chosen:
            self._chosen[key] = None if any(c < 0 for c in capacity) else self._solved(capacity)
        return self._chosen[key]

    def _solved(self, capacity: list[int]) -> Proposal | None:
        instance, since = self.layered.instance(capacity), time.thread_time()
        try:
            found = solve(instance, gap=self.space.gap, time_limit_s=self.search.left_s)
        except Infeasible:
            return None
        finally:
            self.search.spent_s += time.thread_time() - since
        homes = self._elsewhere(self.layered.homes(found.ways.tolist(), self.builder.uniform(0)))
        counted, shares = found.nbytes.tolist(), {}
        if self.search.divides:
            tables, at = self.layered.divided, self.layered.steps[0].at
            homes, more = topped_up(tables, homes, at, capacity[0] - counted[0])
            counted[0] += more
            shares = {"shares": shares_of(tables, homes), "concurrency": tables.concurrency}
        if self.moves.streams:
            predictor, workload = self.builder.predictor, self.space.workload
            homes = with_streams(predictor, replace(homes, stream=None), self.moves.mask, workload)
        params = {
            "uploads": bool(homes.upload.any()),
            "streams": homes.stream is not None and bool(homes.stream.any()),
            "bound_s": found.bound,
            "gap": found.gap,
            "solver": found.method,
            "status": found.status,
            **shares,
        }
        return Proposal(homes, counted, params)

    def finished(self, found: Fitted) -> Fitted:
        """With streams: the proposal with its tokens settled, and the gap to the better of two bounds.

        Bounds are for plans that stream all host weights worth it; where the host keeps some, nothing is proven.
        """
        if not self.moves.streams:
            return found
        homes = not_too_early(self.builder.predictor, found.proposal.homes, self.space.workload)
        plan = self.builder.by_homes(homes, found.proposal.affinity)
        found = replace(
            found,
            proposal=replace(found.proposal, homes=homes),
            dry_run=replace(found.dry_run, plan=plan),
        )
        params = {**found.proposal.params}
        first = float(params.pop("bound_s"))  # type: ignore[arg-type]
        del params["gap"]
        stays = self.moves.mask & (homes.targets == 0)
        if homes.stream is None or (stays & (homes.stream == 0)).any():
            return replace(found, proposal=replace(found.proposal, params={**params, "status": "not proven"}))
        used = self.builder.used(found.dry_run)
        capacity = [
            limit - (total - counted)
            for limit, total, counted in zip(self.builder.limits, used, found.proposal.counted, strict=True)
        ]
        price = 1.0 if self._copies_take_longer(homes) else 0.0
        other = Exact(self.search, self.builder, replace(self.moves, price=price))
        bound = max(first, lower_bound(other.layered.instance(capacity), time_limit_s=self.space.time_limit_s))
        gap = max(0.0, 1 - bound / found.dry_run.seconds)
        return replace(found, proposal=replace(found.proposal, params={**params, "bound_s": bound, "gap": gap}))

    def _copies_take_longer(self, homes: Homes) -> bool:
        """Whether streamed copies take longer than all else in the first micro-batch of the prompt."""
        costs = self.builder.costs
        n, depth = (self.space.workload.chunks(costs.context.n_ubatch) or [(costs.context.n_ubatch, 0)])[0]
        assert homes.stream is not None
        copies = float(costs.stream_copies()[homes.streamed(np.arange(len(costs.targets)), n)].sum())
        stage = self.builder.predictor.stage(homes, n, depth)
        return copies > float(stage.total[0] - stage.copies[0])

    def _elsewhere(self, homes: Homes) -> Homes:
        """Small weights outside of all layers (rope factors): beside most KV caches."""
        costs = self.builder.costs
        inside = {s for layer in self.layered.layers for s in layer.small}
        home = int(np.bincount(homes.layers).argmax())
        small = homes.small.copy()
        for i, name in enumerate(costs.small):
            if i not in inside and name not in self.builder.host_only:
                small[i] = home
        return replace(homes, small=small)
