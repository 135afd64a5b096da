"""Learning from runs: what they took is kept, corrects later predictions, and puts wrong plans to the test again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from statistics import median

from oallama.base.environment import HISTORY
from oallama.base.jsonfile import locked
from oallama.base.printing import say_once
from oallama.data.history import History, Run
from oallama.data.plan import HOST, PlacementPlan
from oallama.data.predicted import predicted_times
from oallama.errors import OallamaError
from oallama.loading.run_times import MIN_TOKENS, RunTimes
from oallama.profiling.fingerprint import cpu_set, fingerprint
from oallama.profiling.recorder import cache_file
from oallama.solving.factors import fitted_factors

# Newer runs count more: one that has this many after it counts half.
_HALF_LIFE = 10
_LEAST_RUNS = 2
_LEAST_CHANGE = 0.03  # a factor this close to 1 is noise
CONTRADICTED = 0.15
_CONTRADICTING_RUNS = 2
_MIN_PROMPT = 32  # a shorter prompt is mostly its first token
_PREFILL_WEIGHT = 0.5  # a first prompt waits for memory to be touched


def learned_factors(history: History, profile: str) -> dict[str, float]:
    """What times of each device and kind of work are to be multiplied by, from clean runs: {"CPU matrices": 1.2}.

    profile: `created` of the profile that predictions are made from; runs of plans from other ones say nothing of it.
    """
    runs = [run for run in history.runs if run.clean and run.profile == profile]
    sums: list[Mapping[str, float]] = []
    observed: list[float] = []
    weights: list[float] = []
    for age, run in enumerate(reversed(runs)):
        for stage, seconds, weight in (("decode", run.tpot_s, 1.0), ("prefill", run.prefill_s, _PREFILL_WEIGHT)):
            terms = {name: s for name, s in run.terms.get(stage, {}).items() if s > 0}
            if seconds and terms:
                sums.append(terms)
                observed.append(seconds)
                weights.append(weight * 0.5 ** (age / _HALF_LIFE))
    if len(runs) < _LEAST_RUNS:
        return {}
    factors = fitted_factors(sums, observed, weights)
    return {name: factor for name, factor in factors.items() if abs(factor - 1) >= _LEAST_CHANGE}


def is_contradicted(plan: PlacementPlan, history: History) -> bool:
    """Whether clean runs of a plan differ from what it promised by more than CONTRADICTED, for the first time.

    What a plan promised is its prediction, corrected by what it took when it was chosen.
    """
    if plan.hash in history.revised:
        return False
    runs = [run for run in history.of_plan(plan.hash) if run.clean and run.source == "run"]
    ratios = [run.ratio for run in runs[-5:] if run.ratio]
    if len(ratios) < _CONTRADICTING_RUNS:
        return False
    found = median(ratios) / _at_its_choice(plan)
    return max(found, 1 / found) > 1 + CONTRADICTED


def _at_its_choice(plan: PlacementPlan) -> float:
    """Measured by predicted seconds per token when the plan was chosen; 1 where it was not measured."""
    measured = plan.measured or {}
    if "tpot_s" not in measured:
        return 1.0
    _, tpot = predicted_times(plan, measured["n_prompt"], measured["n_generate"], measured.get("depth_run", 0))
    return float(measured["tpot_s"] / tpot) if tpot else 1.0


def batch_of(plan: PlacementPlan) -> int:
    """Sequences that generate beside each other in the request that the plan was made and predicted for."""
    return int(plan.planner["params"].get("n_parallel", 1))


def run_of(plan: PlacementPlan, times: RunTimes, depth: int, others_cpus: float, batch: int = 1) -> Run | None:
    """A run of a plan as the history keeps it; None where too little was computed, or another batch than predicted.

    depth: tokens in the cache in the middle of an answer. batch: sequences that generated beside each other.
    """
    if batch != batch_of(plan):
        return None
    enough = times.n_generate >= MIN_TOKENS
    prompt = times.n_prompt >= _MIN_PROMPT
    if not enough and not prompt:
        return None
    prefill_s, predicted_prefill_s = (times.prefill_s, times.predicted_prefill_s) if prompt else (None, None)
    tpot_s, predicted_tpot_s = (times.tpot_s, times.predicted_tpot_s) if enough else (None, None)
    return _run(
        plan,
        source="run",
        n=(times.n_prompt, times.n_generate, depth),
        measured=(prefill_s, tpot_s),
        predicted=(predicted_prefill_s, predicted_tpot_s),
        others_cpus=others_cpus,
    )


def trial_of(plan: PlacementPlan) -> Run | None:
    """What `verify` measured of a plan; None where it could not be run."""
    measured = plan.measured or {}
    if "tpot_s" not in measured:
        return None
    n_prompt, n_generate, depth = measured["n_prompt"], measured["n_generate"], measured["depth_run"]
    ttft, tpot = predicted_times(plan, n_prompt, n_generate, depth)
    return _run(
        plan,
        source="trial",
        n=(n_prompt, n_generate, depth + n_prompt + n_generate // 2),
        measured=(None if depth else measured["ttft_s"], measured["tpot_s"]),
        predicted=(None if depth else ttft, tpot),
        others_cpus=measured["others_cpus"],
    )


def _run(
    plan: PlacementPlan,
    source: str,
    n: tuple[int, int, int],
    measured: tuple[float | None, float | None],
    predicted: tuple[float | None, float | None],
    others_cpus: float,
) -> Run:
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    stages = zip(("prefill", "decode"), predicted, strict=True)
    terms = {stage: _scaled(plan, stage, seconds) for stage, seconds in stages if seconds}
    profile = str(plan.planner["params"].get("profile", ""))
    about = str(plan.model.get("name", "")), plan.hash, str(plan.planner["name"])
    return Run(
        now,
        profile,
        *about,
        source,
        *n,
        plan.context.n_ubatch,
        *measured,
        *predicted,
        round(others_cpus, 3),
        terms,
        batch_of(plan),
    )


def _scaled(plan: PlacementPlan, stage: str, predicted_s: float) -> dict[str, float]:
    """The plan's terms for a stage that is predicted to take so long."""
    terms, learned = plan.predicted.terms.get(stage, {}), plan.predicted.learned
    whole = sum(seconds * learned.get(name, 1.0) for name, seconds in terms.items())
    return {name: seconds * predicted_s / whole for name, seconds in terms.items()} if whole > 0 else {}


# ---- the file -------------------------------------------------------------------------------------------------------


def read_history(path: Path) -> History:
    """The history in a file; one that cannot be used counts as none, which is said once."""
    try:
        return History.load(path)
    except OallamaError as error:
        say_once(f"{error}; it is ignored")
        return History()


def change_history(path: Path, change: Callable[[History], History]) -> None:
    """Change the file under its lock; where it cannot be written this is said once, and nothing else happens."""
    try:
        with locked(path.parent, "history"):
            change(read_history(path)).save(path)
    except OallamaError as error:
        say_once(f"{error}; what this run took is not kept")


def history_file(n_threads: int) -> Path:
    """This machine's file, beside its profiles. n_threads: 0 for all CPUs this process may use."""
    profile = cache_file(fingerprint([HOST], n_threads or len(cpu_set())), None)
    return profile.with_name(profile.name.replace("profile", "history"))


def history_of(n_threads: int) -> History:
    """What was kept of this machine's runs; nothing where OALLAMA_HISTORY=0."""
    return read_history(history_file(n_threads)) if _learns() else History()


def note_revised(plan: PlacementPlan, n_threads: int) -> None:
    """Note that the plan was chosen anew because its runs contradicted it."""
    if _learns():
        change_history(history_file(n_threads), lambda history: history.with_revised(plan.hash))


def keep_runs(n_threads: int, runs: Sequence[Run | None]) -> None:
    """Add runs to this machine's history."""
    found = [run for run in runs if run is not None]

    def add(history: History) -> History:
        for run in found:
            history = history.with_run(run)
        return history

    if found and _learns():
        change_history(history_file(n_threads), add)


def _learns() -> bool:
    return HISTORY.get() != "0"
