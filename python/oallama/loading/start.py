"""The plan that a model starts with: the one that was kept, or a new one, measured beside its rivals at first use."""

from __future__ import annotations

from oallama.data.entries import QUIET_CPUS
from oallama.data.plan import PlacementPlan
from oallama.engine.load_settings import Settings
from oallama.loading.autoplan import MINIMAL, Choices, PathOrText, Progress, choose_devices, consider, read_graph
from oallama.loading.budgets import budgets_for
from oallama.loading.given_plan import ours
from oallama.loading.learning import history_of, is_contradicted, note_revised
from oallama.loading.plan_cache import Question
from oallama.loading.trial import Trial
from oallama.profiling.other_work import cpus_of_others

DEFAULT_CHOICES = Choices()


def plan_model(
    path: PathOrText,
    vram: str | int | None,
    settings: Settings,
    choices: Choices = DEFAULT_CHOICES,
    progress: Progress | None = None,
    trial: Trial | None = None,
) -> PlacementPlan:
    """Plan one model under a budget, profiling what was not measured yet.

    A plan that was made before, for the same question, is read from its file (plan_cache.py), unless its runs have
    contradicted it (learning.py), or it was measured beside other work and the machine is quiet now.

    Args:
        vram: what `parse_budget` takes; None is "auto" where an accelerator is used; "minimal" is the planner's.
        settings: exactly those the model will be loaded with.
        progress: called before every measurement.
        trial: measures the plan beside its strongest rivals at the model's first use; None takes the prediction's word.

    Raises:
        OallamaError: for everything a user can get wrong; the message says what to do.
    """
    before = _question(path, vram, settings, choices)
    kept = before.answer() if before else None
    contradicted = kept is not None and is_contradicted(kept, history_of(settings.n_threads))
    if kept and not contradicted and not (trial and _may_be_better_now(kept)):
        return ours(kept, path)
    considered = consider(path, read_graph(path, settings), vram, settings, choices, progress)
    plan, measured, is_kept = considered.with_terms(considered.found.best), "", False
    try:
        if trial and choices.planner == "auto" and vram != MINIMAL and not choices.elsewhere:
            plan, measured = trial.choose(path, considered, settings.n_threads, progress)
    finally:  # Ctrl-C while it measures ends the program, and keeps the plan at hand
        if kept and contradicted:
            note_revised(kept, settings.n_threads)
        # The profile may have grown since: what is kept is the answer to the question of the next start.
        if after := _question(path, vram, settings, choices):
            is_kept = after.keep(plan)
    if trial and measured:
        trial.say(f"{measured}, and kept for later starts" if is_kept and plan.measured else measured)
    return ours(plan, path)


def kept_plan(
    path: PathOrText, vram: str | int | None, settings: Settings, choices: Choices = DEFAULT_CHOICES
) -> PlacementPlan | None:
    """The plan that a start with these arguments would read from its file; None where it would make one."""
    question = _question(path, vram, settings, choices)
    kept = question.answer() if question else None
    return None if kept is None or is_contradicted(kept, history_of(settings.n_threads)) else kept


def _may_be_better_now(kept: PlacementPlan) -> bool:
    """Whether the plan was measured beside other work, which is gone."""
    then = (kept.measured or {}).get("others_cpus", 0.0)
    return then > QUIET_CPUS and cpus_of_others() < QUIET_CPUS


def _question(path: PathOrText, vram: str | int | None, settings: Settings, choices: Choices) -> Question | None:
    """None where the plan is not to be found again: for another machine, or with times that are to be checked."""
    if choices.elsewhere or choices.recheck:
        return None
    accelerators = choose_devices(choices.device)
    asked = None if vram == MINIMAL else vram
    budgets = budgets_for(asked, accelerators, 0, None, choices.margin) if accelerators else {}
    auto = {name: b.less(choices.reserve.get(name, 0)) for name, b in budgets.items() if b.is_auto}
    now = {name: budget.bytes_total or 0 for name, budget in auto.items()}
    return Question(path, vram, settings, choices, accelerators, now)
