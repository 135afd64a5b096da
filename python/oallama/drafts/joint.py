"""A model and its draft in one budget: every place the draft may have, the bytes of both by dry run, the fastest way.

The draft's bytes are taken off the target's budget, so a draft that pushes weights of the target off the device is
predicted with what that costs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from ..base.printing import seconds
from ..data.budget import format_bytes
from ..data.plan import HOST, ContextSettings, PlacementPlan
from ..data.profile import Profile
from ..data.workload import Workload
from ..engine.draft_pair import check_pair
from ..engine.load_settings import Settings
from ..errors import OallamaError
from ..loading import autoplan
from ..loading.autoplan import TIERS, Choices, Progress
from ..loading.learning import history_of, learned_factors
from ..loading.start import plan_model
from ..planning import OperatorGraph
from ..planning.heads import with_guesses
from ..planning.speculation import LONGEST, Choice, Pair, Passes, choose
from .acceptance import Acceptance

WITHOUT = "no draft"


@dataclass(frozen=True)
class Joint:
    """Every way to generate, the one to take first, and why the others could not be planned.

    draft: None where the target's own MTP heads guess. targets, drafts: plans by the name of the pair; drafts has none
    for "no draft", and none for heads, which are in the plans of their targets. held: bytes of what guesses, by pair
    and device.
    """

    target: Path
    draft: Path | None
    acceptance: Acceptance
    workload: Workload
    choices: list[Choice]
    pairs: Mapping[str, Pair]
    targets: Mapping[str, PlacementPlan]
    drafts: Mapping[str, PlacementPlan]
    held: Mapping[str, Mapping[str, int]]
    failed: Mapping[str, OallamaError]

    @property
    def best(self) -> Choice:
        return self.choices[0]

    @property
    def plan(self) -> PlacementPlan:
        """The chosen plan of the target; one with heads says how many tokens they guess."""
        chosen = self.targets[self.best.pair]
        return with_guesses(chosen, self.best.n) if self.draft is None and self.best.n else chosen

    @property
    def draft_plan(self) -> PlacementPlan | None:
        """The chosen plan of the draft; None without one, and for MTP heads."""
        return self.drafts.get(self.best.pair)

    @property
    def guesser(self) -> str:
        """What guesses, in words."""
        return f"the draft {self.draft.name}" if self.draft else "the MTP head"

    def with_acceptance(self, acceptance: Acceptance) -> Joint:
        """The same plans chosen from by another acceptance."""
        return replace(self, acceptance=acceptance, choices=choose(self.pairs, acceptance.rate, self.workload))

    def describe(self) -> str:
        """The choice in one line."""
        best, said = self.best, f"{seconds(self.best.token_s)} per token predicted"
        if best.n:
            held = self.held[best.pair]
            where = ", ".join(f"{format_bytes(nbytes)} on {name}" for name, nbytes in held.items() if nbytes > 0)
            without = next(choice for choice in self.choices if not choice.n)
            way = f"{self.guesser} guesses {best.n} at a time ({where})"
            return f"{way}: {said}, {seconds(without.token_s)} without it; {self.acceptance}"
        way = f"without {self.guesser}: {said}"
        drafted = next((choice for choice in self.choices if choice.n), None)
        if drafted is None:
            return f"{way}; {next(iter(self.failed.values()))}"
        return f"{way}, {seconds(drafted.token_s)} with the {drafted.pair}, {drafted.n} at a time; {self.acceptance}"

    def to_dict(self) -> dict[str, Any]:
        """For programs; the chosen plans are plan files."""
        return {
            "draft": self.draft.name if self.draft else None,
            "acceptance": asdict(self.acceptance),
            "chosen": self._row(self.best),
            "candidates": [self._row(choice) for choice in self.choices],
            "left_out": {name: str(error) for name, error in self.failed.items()},
        }

    def _row(self, choice: Choice) -> dict[str, Any]:
        return {**asdict(choice), "token_s": choice.token_s, "bytes": dict(self.pairs[choice.pair].nbytes)}


def plan_jointly(
    target: Path,
    draft: Path,
    vram: str | int | None,
    settings: Settings,
    choices: Choices,
    acceptance: Acceptance,
    longest: int = LONGEST,
    progress: Progress | None = None,
) -> Joint:
    """Plan both models for every place of the draft, and choose.

    Args:
        vram: one budget for both: "8GiB", bytes, "auto", "CUDA0=20GiB,CUDA1=6GiB". settings, choices: of the target;
            the draft has the same context, micro-batch and form of attention, as in llama-server, and a cache in f16.
        longest: most tokens guessed at a time, 1 to LONGEST.

    Raises:
        OallamaError: for files that do not go together, budgets that are shares of the weights, and what keeps the
            target from being planned without a draft. A place that the draft cannot have is left out.
    """
    check_request(vram, choices, longest)
    check_pair(target, draft)
    maker = _Maker(target, draft, vram, settings, choices, longest, progress)
    targets, drafts = {WITHOUT: maker.target(maker.choices, maker.settings)}, {}
    failed: dict[str, OallamaError] = {}
    for place in (*maker.accelerators, HOST):
        name = f"draft on {place}"
        try:
            target_plan, draft_plan = maker.both(place)
            targets[name], drafts[name] = target_plan, draft_plan
        except OallamaError as error:
            failed[name] = error
    pairs = {name: maker.pair(plan, drafts.get(name)) for name, plan in targets.items()}
    ranked = choose(pairs, acceptance.rate, maker.workload)
    held = {name: {d: m.total for d, m in plan.predicted.devices.items()} for name, plan in drafts.items()}
    return Joint(target, draft, acceptance, maker.workload, ranked, pairs, targets, drafts, held, failed)


def check_request(vram: str | int | None, choices: Choices, longest: int) -> None:
    """Raises OallamaError for what goes with one model only."""
    if not 1 <= longest <= LONGEST:
        raise OallamaError(f"a draft guesses 1 to {LONGEST} tokens at a time, got {longest}")
    if isinstance(vram, str) and ("%" in vram or vram.strip() == autoplan.MINIMAL):
        raise OallamaError(
            f'the budget {vram} is of one model; with a draft give bytes for both, like "8GiB", or "auto"'
        )
    if choices.recheck:
        raise OallamaError("--recheck scales the times of one plan; with a draft leave it out")


class _Maker:
    """What all candidates share: measured times of both models, their graphs, settings."""

    def __init__(
        self,
        target: Path,
        draft: Path,
        vram: str | int | None,
        settings: Settings,
        choices: Choices,
        longest: int,
        progress: Progress | None,
    ) -> None:
        self._paths, self._vram, self._longest, self._progress = (target, draft), vram, longest, progress
        # Steps of 2 to 5 tokens are what a draft is about: measured, not interpolated between 1 and 32.
        tiers = sorted({*TIERS, 2, longest + 1})
        graph = autoplan.read_graph(target, settings, tiers)
        self.settings = autoplan.resolve(settings, graph.n_ctx_train, choices.elsewhere)
        _, self.accelerators = autoplan.profile_and_devices(graph, self.settings, choices, progress)
        # The draft's times are added to those of the target.
        graph = autoplan.read_graph(draft, self._of_draft(self.settings), tiers)
        self._draft_graph = graph
        autoplan.profile_and_devices(graph, self.settings, choices, progress)
        self.choices = replace(choices, device=",".join(self.accelerators) or HOST)
        self.workload = choices.workload or autoplan.default_workload(self.settings.n_ctx, self.settings.n_seq_max)
        self._graphs: dict[tuple[Path, str], OperatorGraph] = {}

    @cached_property
    def _profile(self) -> Profile:
        """The times of both models, for when the plans are made: planning may record times anew."""
        profile, _ = autoplan.profile_and_devices(self._draft_graph, self.settings, self.choices, self._progress)
        if self.choices.elsewhere:
            return profile
        return profile.corrected(learned_factors(history_of(self.settings.n_threads), profile.created))

    def _of_draft(self, settings: Settings) -> Settings:
        """llama-server takes the target's settings but the types of the cache."""
        return replace(settings, type_k="f16", type_v="f16")

    def target(self, choices: Choices, settings: Settings) -> PlacementPlan:
        return plan_model(self._paths[0], self._vram, settings, choices, self._progress)

    def both(self, place: str) -> tuple[PlacementPlan, PlacementPlan]:
        """Plans of target and draft, the draft on a device or on the CPU."""
        settings, choices = self.settings, replace(self.choices, outputs=self._longest + 1)
        for _ in range(3):  # the micro-batch is settled in the second round, the form of attention in the third
            draft = self._draft(place, settings)
            held = {name: memory.total for name, memory in draft.predicted.devices.items() if name != HOST}
            target = self.target(replace(choices, reserve=held), settings)
            made = target.context
            if replace(settings, **_shared(made)) == settings:
                return target, draft
            settings = replace(settings, **_shared(made))
            choices = replace(choices, fixed_ubatch=True)
        raise AssertionError("the target's context does not settle")

    def _draft(self, place: str, settings: Settings) -> PlacementPlan:
        asked = replace(self.choices, device=place, fixed_ubatch=True, paper=False, fraction=None)
        settings = self._of_draft(settings)
        if place == HOST:
            budget, asked = None, replace(asked, planner="auto", margin=None)
            # On the CPU "auto" is the fused form; a plan for the CPU alone would be free to choose.
            settings = replace(settings, flash_attn="on" if settings.flash_attn == "auto" else settings.flash_attn)
        else:
            budget, asked = _part_of(self._vram, place), replace(asked, planner="all")
        return plan_model(self._paths[1], budget, settings, asked, self._progress)

    def pair(self, target: PlacementPlan, draft: PlacementPlan | None) -> Pair:
        work = self.workload
        checks = self._passes(self._paths[0], target)
        longest = self._longest if draft else 0
        nbytes = {name: memory.total for name, memory in target.predicted.devices.items()}
        check = {n: checks.check(n + 1, work) for n in range(longest + 1)}
        if draft is None:
            return Pair(None, checks.ttft(work), check, {}, {}, nbytes)
        guesses = self._passes(self._paths[1], draft)
        for name, memory in draft.predicted.devices.items():
            nbytes[name] = nbytes.get(name, 0) + memory.total
        lengths = range(1, longest + 1)
        guess = {n: guesses.guess(n, work) for n in lengths}
        repeat = {n: guesses.repeat(n + 1, work) for n in lengths}
        on = next(iter(draft.devices))
        return Pair(on, checks.ttft(work) + guesses.ttft(work), check, guess, repeat, nbytes)

    def _passes(self, path: Path, plan: PlacementPlan) -> Passes:
        key = (path, plan.context.flash_attn)
        if key not in self._graphs:
            context = plan.context
            settings = replace(
                self.settings, flash_attn=context.flash_attn, type_k=context.type_k, type_v=context.type_v
            )
            self._graphs[key] = autoplan.read_graph(path, settings, (min(TIERS), max(TIERS)))
        return Passes(self._graphs[key], self._profile, plan)


def _shared(context: ContextSettings) -> dict[str, Any]:
    """What a plan may change of the settings, and llama-server has once for both models."""
    return {"n_batch": context.n_batch, "n_ubatch": context.n_ubatch, "flash_attn": context.flash_attn}


def _part_of(vram: str | int | None, device: str) -> str | int | None:
    """The budget of one device: a budget may name several."""
    if isinstance(vram, str) and "=" in vram:
        parts = dict(part.partition("=")[::2] for part in vram.split(","))
        return next((text.strip() for name, text in parts.items() if name.strip() == device), None)
    return vram
