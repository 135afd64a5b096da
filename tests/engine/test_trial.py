"""The first use of a model: what is measured, what is kept, and what happens when it cannot be done."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from oallama import Llama, OallamaError
from oallama.data.entries import KINDS, MATRICES
from oallama.data.plan import HOST, PlacementPlan
from oallama.engine.load_settings import Settings
from oallama.loading import autoplan, start, trial
from oallama.loading.autoplan import Choices, Considered, consider, read_graph
from oallama.loading.learning import history_file, read_history
from oallama.loading.trial import Trial, choose_measured
from oallama.planning import Workload
from support.made_profile import made_profile

SETTINGS = Settings(n_ctx=256, n_threads=1)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Plans and history of this test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("OALLAMA_PLAN_CACHE", "OALLAMA_HISTORY", "OALLAMA_VERIFY"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "cache" / "oallama"


@pytest.fixture
def model(tiny: Callable[..., Path]) -> Path:
    return tiny("llama")


@pytest.fixture
def profile(model: Path, rpc: Any, tmp_path: Path) -> Path:
    path = tmp_path / "profile.json"
    made_profile(model, rpc.devices[0], SETTINGS).save(path)
    return path


@pytest.fixture
def choices(rpc: Any, profile: Path) -> Choices:
    return Choices(device=rpc.devices[0], profile=profile)


@pytest.fixture
def considered(model: Path, choices: Choices, cache: Path) -> Considered:
    return consider(model, read_graph(model, SETTINGS), "50%", SETTINGS, choices)


def timed(
    plan: PlacementPlan, request_s: float, rounds: int = 9, steady: bool = True, noise: float = 0.0
) -> PlacementPlan:
    """noise: share by which every second round is slower, and the others are faster."""
    each = [request_s * (1 + noise * (-1) ** i) for i in range(rounds)]
    found = {"request_s": request_s, "rounds": rounds, "rounds_s": each, "range_s": (request_s, request_s)}
    return plan.with_measured({**found, "steady": steady})


def fake(monkeypatch: pytest.MonkeyPatch, seconds: dict[str, float], others: float = 0.0) -> list[dict[str, Any]]:
    """Measured times by planner in place of real runs; returns what was asked. others: CPUs that other work takes."""
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(trial, "_HOPELESS", 1e9)  # the made profile's host is slow
    monkeypatch.setattr(trial, "fit_together", lambda plans: True)

    def verify(path: Path, plans: Sequence[PlacementPlan], **request: Any) -> list[PlacementPlan]:
        asked.append({**request, "plans": [plan.planner["name"] for plan in plans]})
        shape = {"n_prompt": 64, "n_generate": 16, "depth_run": 0, "others_cpus": others, "rounds": 9, "steady": True}
        times = [seconds.get(plan.planner["name"], 1.0) for plan in plans]
        done = [
            plan.with_measured(
                {**shape, "ttft_s": s / 2, "tpot_s": s / 30, "request_s": s, "rounds_s": [s] * 9, "range_s": (s, s)}
            )
            for plan, s in zip(plans, times, strict=True)
        ]
        return sorted(done, key=lambda plan: plan.measured["request_s"])

    monkeypatch.setattr(trial, "verify", verify)
    return asked


def test_the_first_use_is_really_measured_and_later_starts_are_not(
    model: Path, choices: Choices, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(trial, "_MOST_ROUNDS", 2)
    monkeypatch.setattr(start, "cpus_of_others", lambda: 1.0)  # else what was measured beside others comes again
    first = start.plan_model(model, "50%", SETTINGS, choices, trial=Trial(10.0, said.append))
    assert first.measured and first.measured["rounds"] >= 1 and first.measured["rivals"]
    assert (
        len(said) == 1 and "measured at first use" in said[0] and said[0].endswith("taken, and kept for later starts")
    )
    monkeypatch.setattr(trial, "verify", None)  # not called again
    again = start.plan_model(model, "50%", SETTINGS, choices, trial=Trial(60.0, said.append))
    assert again == first and len(said) == 1
    runs = read_history(history_file(SETTINGS.n_threads)).runs
    assert {run.source for run in runs} == {"trial"} and len(runs) == 1 + len(first.measured["rivals"])


def test_what_was_measured_beside_other_work_is_measured_again_when_it_is_gone(
    model: Path, choices: Choices, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = fake(monkeypatch, {}, others=1.0)
    for others, measured in ((1.0, 1), (1.0, 1), (0.0, 2)):
        monkeypatch.setattr(start, "cpus_of_others", lambda others=others: others)
        start.plan_model(model, "50%", SETTINGS, choices, trial=Trial(60.0))
        assert len(asked) == measured
    fake(monkeypatch, {})
    start.plan_model(model, "50%", SETTINGS, choices, trial=Trial(60.0))
    monkeypatch.setattr(trial, "verify", None)  # now it was quiet: not called again
    start.plan_model(model, "50%", SETTINGS, choices, trial=Trial(60.0))


def test_the_fastest_by_measurement_is_kept(
    model: Path, choices: Choices, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = fake(monkeypatch, {"cpu": 0.5})
    plan = start.plan_model(model, "50%", SETTINGS, choices, trial=Trial(60.0))
    assert "cpu" in asked[0]["plans"], "the CPU alone is a rival"
    assert plan.planner["name"] == "cpu" and len(plan.measured["rivals"]) == len(asked[0]["plans"]) - 1
    assert start.plan_model(model, "50%", SETTINGS, choices).hash == plan.hash


def test_a_plan_that_cannot_be_kept_is_not_called_kept(
    model: Path, choices: Choices, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake(monkeypatch, {})
    cache.mkdir(parents=True)
    (cache / "plans").write_text("a file where the folder would be")
    said: list[str] = []
    start.plan_model(model, "50%", SETTINGS, choices, trial=Trial(60.0, said.append))
    assert len(said) == 1 and said[0].endswith(" is taken")


def test_noise_does_not_change_the_choice(considered: Considered) -> None:
    ours, other, *_ = considered.found.plans.values()
    assert choose_measured(ours.hash, [timed(other, 0.99), timed(ours, 1.0)]).hash == ours.hash
    assert choose_measured(ours.hash, [timed(other, 0.95), timed(ours, 1.0)]).hash == other.hash
    assert choose_measured(ours.hash, [timed(other, 0.95, 1), timed(ours, 1.0, 1)]).hash == ours.hash
    noisy = [timed(other, 0.95, 10, noise=0.05), timed(ours, 1.0, 10, noise=-0.05)]
    assert choose_measured(ours.hash, noisy).hash == ours.hash, "every second round says the opposite"
    drift = [timed(other, 0.95, 10, noise=0.05), timed(ours, 1.0, 10, noise=0.05)]
    assert choose_measured(ours.hash, drift).hash == other.hash, "all rounds say the same"
    assert choose_measured(ours.hash, [timed(other, 0.85, 1), timed(ours, 1.0, 1)]).hash == other.hash
    failed = ours.with_measured({"error": "no memory"})
    assert choose_measured(ours.hash, [timed(other, 9.0), failed]).hash == other.hash


def test_beside_bursts_a_plan_with_more_traffic_must_be_faster(considered: Considered) -> None:
    safe, risky = considered.found.plans["cpu"], considered.found.plans["layers"]
    level = [timed(risky, 0.99, steady=False), timed(safe, 1.0, steady=False)]
    assert choose_measured(risky.hash, level).hash == safe.hash
    faster = [timed(risky, 0.9, steady=False), timed(safe, 1.0, steady=False)]
    winner = choose_measured(safe.hash, faster)
    assert winner.hash == risky.hash
    assert "9 rounds beside work that comes and goes" in trial.describe(winner, faster)


def test_nothing_is_measured_that_takes_longer_than_allowed(
    model: Path, considered: Considered, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = fake(monkeypatch, {})
    plan, said = Trial(0.01).choose(model, considered, 1)
    assert plan.measured is None and asked == [] and "not measured" in said
    plan, said = Trial(0.0).choose(model, considered, 1)
    assert plan.measured is None and not said


@pytest.mark.parametrize(
    ("own", "run"), [((24, 4), (24, 4)), ((200, 48), (128, 16)), ((0, 8), (128, 8)), ((24, 1), (24, 2))]
)
def test_no_more_is_run_than_the_plans_own_request(
    own: tuple[int, int],
    run: tuple[int, int],
    model: Path,
    choices: Choices,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What a request without a prompt is run behind does not count; a time per token takes two tokens."""
    asked = fake(monkeypatch, {})
    request = replace(choices, workload=Workload(*own))
    Trial(600.0).choose(model, consider(model, read_graph(model, SETTINGS), "50%", SETTINGS, request), 1)
    assert asked[0]["workload"] == run


def test_the_variable_sets_the_time(model: Path, considered: Considered, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = fake(monkeypatch, {})
    monkeypatch.setenv("OALLAMA_VERIFY", "0")
    assert Trial().choose(model, considered, 1)[0].measured is None
    monkeypatch.setenv("OALLAMA_VERIFY", "33")
    assert Trial().choose(model, considered, 1)[0].measured and asked[0]["limit_s"] == 33.0
    monkeypatch.setenv("OALLAMA_VERIFY", "soon")
    with pytest.raises(OallamaError, match="expected seconds"):
        Trial().choose(model, considered, 1)


def test_rivals_are_llama_cpps_own_and_differ_from_the_plan(
    model: Path, considered: Considered, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = fake(monkeypatch, {})
    Trial(600.0).choose(model, considered, 1)
    ours, *rivals = asked[0]["plans"]
    assert ours == considered.found.best.planner["name"] and len(rivals) == 2 and "cpu" in {ours, *rivals}
    assert {*rivals} - {"cpu"} <= {"fit", "layers", "fewer-layers", "cpu-ffn"}


def test_our_attention_on_the_cpu_is_measured_beside_llama_cpps(
    model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a device, and never with our kernels in a rival; llama.cpp's is kept where it is faster."""
    times = made_profile(model, None, SETTINGS, own=4.0)
    request = Choices(device=HOST, profile=times, workload=Workload(8, 32, 200))
    alone = consider(model, read_graph(model, SETTINGS), None, SETTINGS, request)
    asked = fake(monkeypatch, {"stock-cpu": 0.5})
    kept, _ = Trial(600.0).choose(model, alone, 1)
    assert asked[0]["plans"] == ["cpu", "stock-cpu"] and alone.found.best.context.attention == "oallama"
    assert kept.planner["name"] == "stock-cpu" and kept.context.attention == "ggml"
    assert [*kept.measured["rivals"]] == ["the CPU alone with oallama's attention"]
    plain = replace(request, profile=made_profile(model, None, SETTINGS))
    found = consider(model, read_graph(model, SETTINGS), None, SETTINGS, plain)
    plan, said = Trial(600.0).choose(model, found, 1)
    assert plan.measured is None and not said and len(asked) == 1


def raising(error: BaseException) -> Callable[..., None]:
    def verify(*_: Any, **__: Any) -> None:
        raise error

    return verify


def test_ctrl_c_ends_the_first_use_and_keeps_the_plan_at_hand(
    model: Path, choices: Choices, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial, "verify", raising(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        start.plan_model(model, "50%", SETTINGS, choices, trial=Trial(60.0))
    (kept,) = cache.glob("plans/*.json")
    monkeypatch.setattr(trial, "verify", raising(AssertionError("measured again")))
    again = start.plan_model(model, "50%", SETTINGS, choices, trial=Trial(60.0))
    assert again == PlacementPlan.load(kept) and again.measured is None


def test_a_measurement_that_fails_leaves_the_predicted_plan(
    model: Path, choices: Choices, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial, "verify", raising(OallamaError("none of 2 plans could be measured")))
    said: list[str] = []
    plan = start.plan_model(model, "50%", SETTINGS, choices, trial=Trial(60.0, said.append))
    assert plan.measured is None and len(said) == 1
    assert start.plan_model(model, "50%", SETTINGS, choices).hash == plan.hash  # and it is kept


def test_a_cache_that_cannot_be_written_leaves_everything_working(
    model: Path, choices: Choices, cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "blocked").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "blocked"))
    fake(monkeypatch, {})
    assert start.plan_model(model, "50%", SETTINGS, choices, trial=Trial(60.0)).measured


def test_a_run_is_kept_when_the_model_is_closed_and_contradiction_measures_again(
    model: Path, choices: Choices, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from oallama.data.history import Run

    asked = fake(monkeypatch, {})
    plan = start.plan_model(model, "50%", SETTINGS, choices, trial=Trial(60.0))
    assert len(asked) == 1
    for _ in range(2):
        llm = Llama(str(model), plan=plan, n_threads=1, verbose=False)
        llm("a b c", max_tokens=24, temperature=0.0)
        llm.close()
        llm.close()
    history = read_history(history_file(1))
    runs: list[Run] = [run for run in history.runs if run.source == "run"]
    assert len(runs) == 2 and all(run.plan == plan.hash and run.tpot_s for run in runs)
    assert sum(runs[0].terms["decode"].values()) == pytest.approx(runs[0].predicted_tpot_s)
    clean = [replace(run, others_cpus=0.0, tpot_s=9.0 * (run.predicted_tpot_s or 0.0)) for run in runs]
    replace(history, runs=tuple(clean)).save(history_file(1))
    start.plan_model(model, "50%", SETTINGS, choices, trial=Trial(60.0))
    assert len(asked) == 2 and read_history(history_file(1)).revised == (plan.hash,)
    start.plan_model(model, "50%", SETTINGS, choices, trial=Trial(60.0))
    assert len(asked) == 2  # once


def test_terms_add_up_to_the_prediction(considered: Considered) -> None:
    for plan in considered.found.plans.values():
        told = considered.with_terms(plan)
        whole = sum(seconds for terms in told.predicted.terms.values() for seconds in terms.values())
        assert whole == pytest.approx(plan.predicted.request_s, rel=0.02)
        if plan.devices == (HOST,):
            assert {name.split()[0] for terms in told.predicted.terms.values() for name in terms} == {HOST}


def test_a_plan_notes_what_was_learned_of_its_devices(considered: Considered) -> None:
    learned = {f"{HOST} {kind}": 1.1 for kind in KINDS}
    plan = autoplan._learned(considered.found.plans["cpu"], {**learned, f"RPC9 {MATRICES}": 2.0})
    assert plan.predicted.learned == learned
