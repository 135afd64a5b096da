"""A model and the MTP heads in its file in one budget: every place the heads may have, and the fastest way.

The heads' weights are loaded with the model; they run in a context of their own on the same model (llama-server's
`--spec-type draft-mtp`). Their output matrix and, as a rule, their embedding are the model's. So their bytes are those
of their weights, and of KV cache and compute buffers of that context, which depend on the plan of the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path

from ..data.plan import HOST, DeviceMemory, PlacementPlan
from ..data.profile import Profile
from ..engine.load_settings import Settings
from ..engine.mtp_heads import count_heads, keeps_states
from ..errors import OallamaError
from ..loading import autoplan
from ..loading.autoplan import TIERS, Choices, Progress
from ..loading.dry_run import LocalAllocators
from ..loading.learning import history_of, learned_factors
from ..loading.start import plan_model
from ..planning import OperatorGraph
from ..planning.cost import CostModel
from ..planning.heads import CACHE_TYPE, counted, heads_context, with_heads
from ..planning.pool import pool_bytes
from ..planning.speculation import LONGEST, Pair, Passes, choose
from .acceptance import Acceptance
from .joint import Joint, check_request

WITHOUT = "no head"
_ROUNDS = 6  # of making room for what the heads were found to take: three settle the context, as with a draft


def plan_with_heads(
    target: Path,
    vram: str | int | None,
    settings: Settings,
    choices: Choices,
    acceptance: Acceptance,
    longest: int = LONGEST,
    progress: Progress | None = None,
) -> Joint:
    """Plan a model for every place of its MTP heads, and choose.

    Args:
        vram: one budget for model and heads: "8GiB", bytes, "auto", "CUDA0=20GiB,CUDA1=6GiB". settings, choices: of the
            model; the heads have the same context, micro-batch and form of attention, and a cache in f16.
        longest: most tokens guessed at a time, 1 to LONGEST; a chain of heads guesses as many as it has heads.

    Raises:
        OallamaError: for a file without heads that llama.cpp runs, budgets that are shares of the weights, and what
            keeps the model from being planned without them. A place that the heads cannot have is left out.
    """
    check_request(vram, choices, longest)
    n_heads = count_heads(target)
    longest = min(longest, n_heads) if n_heads > 1 else longest
    maker = _Maker(target, vram, settings, choices, longest, progress)
    held: dict[str, dict[str, DeviceMemory]] = {}
    targets, failed = {WITHOUT: maker.plain}, {}
    places = {f"head on {place}": place for place in (*maker.accelerators, HOST)}
    for name, place in places.items():
        try:
            targets[name], held[name] = maker.beside(place)
        except OallamaError as error:
            failed[name] = error
    pairs = {name: maker.pair(plan, places.get(name)) for name, plan in targets.items()}
    sizes = {name: {device: m.total for device, m in found.items()} for name, found in held.items()}
    ranked = choose(pairs, acceptance.rate, maker.workload)
    return Joint(target, None, acceptance, maker.workload, ranked, pairs, targets, {}, sizes, failed)


class _Maker:
    """What all candidates share: measured times of model and heads, their graphs, settings."""

    def __init__(
        self,
        path: Path,
        vram: str | int | None,
        settings: Settings,
        choices: Choices,
        longest: int,
        progress: Progress | None,
    ) -> None:
        self._path, self._vram, self._longest, self._progress = path, vram, longest, progress
        # Steps of 2 to 5 tokens are what guessing is about: measured, not interpolated between 1 and 32.
        self._tiers = sorted({*TIERS, 2, longest + 1})
        graph = autoplan.read_graph(path, settings, self._tiers)
        self.settings = autoplan.resolve(settings, graph.n_ctx_train, choices.elsewhere)
        self._machine, self.accelerators = autoplan.profile_and_devices(graph, self.settings, choices, progress)
        self._choices = replace(choices, device=",".join(self.accelerators) or HOST)
        self._heads = autoplan.read_graph(path, self._of_heads, self._tiers)
        autoplan.profile_and_devices(self._heads, self._of_heads, self._choices, progress)
        self.workload = choices.workload or autoplan.default_workload(self.settings.n_ctx, self.settings.n_seq_max)
        self._graphs: dict[tuple[Settings, str], OperatorGraph] = {}

    @property
    def _of_heads(self) -> Settings:
        """Settings of the heads' context."""
        return replace(self.settings, heads="run", type_k=CACHE_TYPE, type_v=CACHE_TYPE)

    @cached_property
    def _fed(self) -> Settings:
        """Settings of the model's own context while its heads guess."""
        n_states = self._longest if keeps_states(self._path) else 0
        return replace(self.settings, heads="fed", n_rs_seq=n_states)

    @cached_property
    def _profile(self) -> Profile:
        """The times of model and heads, for when the plans are made: planning may record times anew."""
        profile, _ = autoplan.profile_and_devices(self._heads, self._of_heads, self._choices, self._progress)
        if self._choices.elsewhere:
            return profile
        return profile.corrected(learned_factors(history_of(self.settings.n_threads), profile.created))

    @cached_property
    def plain(self) -> PlacementPlan:
        """The plan without heads."""
        return plan_model(self._path, self._vram, self.settings, self._choices, self._progress)

    def beside(self, place: str) -> tuple[PlacementPlan, dict[str, DeviceMemory]]:
        """The plan with the heads on a device or on the CPU, and what they take of each."""
        settings, choices = self._fed, replace(self._choices, outputs=self._longest + 1)
        # A first guess: what they would take beside the plan without them.
        found = reserved = _totals(self._memory(with_heads(self.plain, self._heads, place), self.plain))
        for _ in range(_ROUNDS):
            plan = plan_model(self._path, self._vram, settings, replace(choices, reserve=reserved), self._progress)
            made = with_heads(plan, self._heads, place)
            held = self._memory(made, plan)
            found = _totals(held)
            if all(nbytes <= reserved.get(name, 0) for name, nbytes in found.items()):
                return counted(made, held, reserved), held
            reserved = {name: max(found.get(name, 0), reserved.get(name, 0)) for name in {**found, **reserved}}
        raise OallamaError(f"what the heads take on {place} does not settle: {found} bytes at last")

    def _memory(self, made: PlacementPlan, plan: PlacementPlan) -> dict[str, DeviceMemory]:
        """Bytes of the heads in `made` on each device, by dry run; `plan` is the same without them."""
        choices, profile = self._choices, None
        if choices.elsewhere and choices.profile is not None:
            profile = autoplan.load_profile(choices.profile, self.settings.n_threads, elsewhere=True)
        accelerators = tuple(name for name in made.devices if name != HOST)
        theirs = replace(made, context=heads_context(made.context))
        found = LocalAllocators(self._path, self._of_heads, accelerators, profile).memory(theirs)
        graph = self._graph(self._of_heads, made.context.flash_attn)
        costs = CostModel(graph, self._machine, accelerators, theirs.context)
        held = {}
        for name, m in found.items():
            own = plan.predicted.devices.get(name, DeviceMemory(0, 0, 0))
            pool = pool_bytes(costs, theirs, name)
            held[name] = DeviceMemory(m["weights"] - own.weights, m["kv"], m["compute"], pool)
        return held

    def pair(self, plan: PlacementPlan, place: str | None) -> Pair:
        """place: of the heads; None: without them."""
        work, nbytes = self.workload, {name: m.total for name, m in plan.predicted.devices.items()}
        model = Passes(self._graph(self._fed if place else self.settings, plan.context.flash_attn), self._profile, plan)
        if place is None:
            return Pair(None, model.ttft(work), {0: model.check(1, work)}, {}, {}, nbytes)
        theirs = replace(plan, context=heads_context(plan.context))
        heads = Passes(self._graph(self._of_heads, plan.context.flash_attn), self._profile, theirs)
        lengths, times = range(1, self._longest + 1), self._heads.n_heads  # all of a chain read what is there
        check = {n: model.check(n + 1, work) for n in (0, *lengths)}
        guess = {n: heads.guess(n, work, chained=times > 1) for n in lengths}
        repeat = {n: times * heads.repeat(n + 1, work, logits=False) for n in lengths}
        return Pair(place, model.ttft(work) + times * heads.read(work), check, guess, repeat, nbytes)

    def _graph(self, settings: Settings, flash_attn: str) -> OperatorGraph:
        key = (settings, flash_attn)
        if key not in self._graphs:
            ends = (min(TIERS), max(TIERS))
            self._graphs[key] = autoplan.read_graph(self._path, replace(settings, flash_attn=flash_attn), ends)
        return self._graphs[key]


def _totals(held: Mapping[str, DeviceMemory]) -> dict[str, int]:
    """Bytes on accelerators; a plan with heads may take a little less, where weights move and lie beside others."""
    return {name: memory.total for name, memory in held.items() if name != HOST and memory.total > 0}
