"""What runs took: the file, what is learned from it, and when a plan is put to the test again."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

from oallama import OallamaError
from oallama.data.history import KEPT, History, Run
from oallama.data.plan import PlacementPlan
from oallama.loading.learning import (
    CONTRADICTED,
    change_history,
    is_contradicted,
    learned_factors,
    read_history,
    run_of,
    trial_of,
)
from oallama.loading.run_times import RunTimes
from support.plans import make as a_plan

TERMS = {
    "prefill": {"CPU matrices": 0.3, "RPC0 matrices": 0.1},
    "decode": {"CPU matrices": 0.04, "RPC0 matrices": 0.01},
}


def planned(**more: object) -> PlacementPlan:
    plan = a_plan()
    predicted = replace(
        plan.predicted, terms=TERMS, ttft_s={64: 0.4, 128: 0.8}, tpot_s={0: 0.05, 512: 0.05}, learned={}
    )
    return replace(plan, predicted=predicted, planner={"name": "exact", "params": {"profile": "p1"}}, **more)


def a_run(plan: PlacementPlan, tpot_s: float = 0.05, others_cpus: float = 0.0, prefill_s: float = 0.4) -> Run:
    times = RunTimes(64, prefill_s, 0.4, 32, tpot_s, 0.05)
    run = run_of(plan, times, depth=80, others_cpus=others_cpus)
    assert run is not None
    return run


def test_the_file_gives_back_what_was_kept(tmp_path: Path) -> None:
    history = History().with_run(a_run(planned())).with_revised("abc")
    history.save(tmp_path / "history.json")
    assert History.load(tmp_path / "history.json") == history


def test_only_the_newest_runs_are_kept() -> None:
    history, plan = History(), planned()
    for number in range(KEPT + 5):
        history = history.with_run(replace(a_run(plan), n_prompt=number))
    assert [run.n_prompt for run in history.runs] == [*range(5, KEPT + 5)]


def damaged(content: dict[str, object], **more: object) -> str:
    return json.dumps({**content, **more})


@pytest.mark.parametrize("kind", ["text", "version", "cut", "seconds", "rows"])
def test_a_file_that_cannot_be_used_is_ignored_and_said_once(
    kind: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / f"history-{kind}.json"
    History().with_run(a_run(planned())).save(path)
    content = json.loads(path.read_text())
    text = {
        "text": "no JSON",
        "version": damaged(content, schema="oallama.history/9"),
        "cut": path.read_text()[:-40],
        "seconds": damaged(content, runs=[{**content["runs"][0], "tpot_s": -1.0}]),
        "rows": damaged(content, runs=[1, 2]),
    }[kind]
    path.write_text(text)
    with pytest.raises(OallamaError, match="history"):
        History.load(path)
    assert read_history(path) == read_history(path) == History()
    assert capfd.readouterr().err.count(str(path)) == 1
    change_history(path, lambda history: history.with_run(a_run(planned())))
    assert len(History.load(path).runs) == 1  # the next run makes it good


def test_a_folder_that_cannot_be_written_is_said_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    for _ in range(2):
        change_history(tmp_path / "file" / "history.json", lambda history: history)
    assert capfd.readouterr().err.count("is not kept") == 1


def test_a_few_tokens_are_no_run() -> None:
    assert run_of(planned(), RunTimes(6, 0.1, None, 3, 0.2, 0.05), depth=8, others_cpus=0.0) is None


def test_terms_of_a_run_add_up_to_what_was_predicted_of_it() -> None:
    run = a_run(planned())
    assert sum(run.terms["decode"].values()) == pytest.approx(0.05)
    assert sum(run.terms["prefill"].values()) == pytest.approx(0.4)


def test_terms_are_what_they_were_before_anything_was_learned() -> None:
    plan = planned()
    learned = {"CPU matrices": 2.0}
    whole = 0.04 * 2 + 0.01
    plan = replace(plan, predicted=replace(plan.predicted, learned=learned, tpot_s={0: whole, 512: whole}))
    run = run_of(plan, RunTimes(6, 0.1, None, 32, 0.1, whole), depth=22, others_cpus=0.0)
    assert run is not None and run.terms["decode"] == pytest.approx({"CPU matrices": 0.04, "RPC0 matrices": 0.01})


def test_a_profile_that_is_wrong_by_device_is_made_good_by_five_runs() -> None:
    """Scaled by 0.6 to 1.6 per device, predictions are within 10 % after five runs, of other plans, too."""
    rng = random.Random(3)
    for _ in range(200):
        true = {"CPU matrices": rng.uniform(0.6, 1.6), "RPC0 matrices": rng.uniform(0.6, 1.6)}
        history = History()
        for _ in range(5):
            plan = planned()
            decode = {"CPU matrices": rng.uniform(0.01, 0.04), "RPC0 matrices": rng.uniform(0.005, 0.02)}
            took = sum(s * true[name] for name, s in decode.items()) * rng.uniform(0.99, 1.01)
            run = replace(a_run(plan, took, prefill_s=0.4), prefill_s=None, terms={"decode": decode})
            history = history.with_run(run)
        learned = learned_factors(history, "p1")
        for _, decode in zip(range(5), [run.terms["decode"] for run in history.runs], strict=True):
            expected = sum(s * true[name] for name, s in decode.items())
            found = sum(s * learned.get(name, 1.0) for name, s in decode.items())
            assert found == pytest.approx(expected, rel=0.10)


def test_runs_beside_other_work_and_of_other_profiles_teach_nothing() -> None:
    plan, history = planned(), History()
    for _ in range(4):
        history = history.with_run(a_run(plan, 0.1, others_cpus=0.8, prefill_s=0.8))
    assert learned_factors(history, "p1") == {}
    clean = History(tuple(replace(run, others_cpus=0.0) for run in history.runs))
    assert learned_factors(clean, "another") == {}
    learned = learned_factors(clean, "p1")
    corrected = sum(seconds * learned[name] for name, seconds in TERMS["decode"].items())
    assert corrected == pytest.approx(2 * 0.05, rel=0.05)


def test_a_plan_is_contradicted_once_by_clean_runs() -> None:
    plan, slow = planned(), 0.05 * (1 + CONTRADICTED) * 1.05
    one = History().with_run(a_run(plan, slow))
    two = one.with_run(a_run(plan, slow))
    assert not is_contradicted(plan, one)  # once is an accident
    assert is_contradicted(plan, two)
    assert not is_contradicted(plan, two.with_revised(plan.hash))
    assert not is_contradicted(plan, History().with_run(a_run(plan)).with_run(a_run(plan)))
    busy = [a_run(plan, slow, others_cpus=1.0) for _ in range(4)]
    assert not is_contradicted(plan, History(tuple(busy)))


def test_what_a_plan_took_when_it_was_chosen_is_its_promise() -> None:
    measured = {"ttft_s": 0.5, "tpot_s": 0.07, "n_prompt": 64, "n_generate": 16, "depth_run": 0, "others_cpus": 0.0}
    plan = planned(measured=measured)
    as_measured = History().with_run(a_run(plan, 0.07)).with_run(a_run(plan, 0.07))
    as_predicted = History().with_run(a_run(plan, 0.05)).with_run(a_run(plan, 0.05))
    assert not is_contradicted(plan, as_measured) and is_contradicted(plan, as_predicted)
    run = trial_of(plan)
    assert run is not None and run.source == "trial" and run.ratio == pytest.approx(1.4)
    assert trial_of(planned(measured={"error": "no"})) is None
