"""Speculative decoding: the choice by hand-made numbers, and passes of a plan against those that it predicts itself."""

from __future__ import annotations

from dataclasses import replace

import pytest

from oallama.data.workload import Workload
from oallama.planning.speculation import Pair, Passes, choose, tokens_per_step
from support.planned import MODEL, plan
from support.synthetic import profile

WORK = Workload(n_prompt=10, n_generate=101)


def pair(on: str | None, check: list[float], guess: float = 0.0, repeat: list[float] = (), ttft: float = 1.0) -> Pair:
    return Pair(on, ttft, dict(enumerate(check)), {n: n * guess for n in range(9)}, dict(enumerate(repeat)), {})


def test_tokens_of_a_step():
    assert tokens_per_step(0.5, 3) == 1.875  # 1 + 1/2 + 1/4 + 1/8
    assert tokens_per_step(0.0, 4) == 1.0 and tokens_per_step(1.0, 4) == 5.0


def test_a_draft_that_fits_wins():
    """Two tokens cost 10 + 2*1 + 1 = 13 ms and give 1.75; one costs 10."""
    pairs = {
        "none": pair(None, [10.0]),
        "gpu": pair("GPU0", [10.0, 10.0, 10.0], guess=1.0, repeat=[1.0, 1.0, 1.0], ttft=1.5),
    }
    first, second, last = choose(pairs, 0.5, WORK)
    assert (first.pair, first.n, first.tokens, first.step_s) == ("gpu", 2, 1.75, 13.0)
    assert first.token_s == pytest.approx(13 / 1.75) and first.request_s == pytest.approx(1.5 + 100 * 13 / 1.75)
    assert (second.pair, second.n, second.token_s) == ("gpu", 1, 8.0)
    assert (last.pair, last.n, last.token_s, last.request_s) == ("none", 0, 10.0, 1001.0)


def test_a_draft_that_pushes_layers_off_the_device_loses():
    """Beside it a pass takes 25 in place of 10; on the CPU its guesses take 12 each."""
    pairs = {
        "none": pair(None, [10.0]),
        "gpu": pair("GPU0", [25.0, 25.0], guess=1.0, repeat=[1.0, 1.0]),
        "cpu": pair("CPU", [10.0, 10.0], guess=12.0, repeat=[12.0, 12.0]),
    }
    assert [(c.pair, c.n) for c in choose(pairs, 0.9, WORK)] == [("none", 0), ("gpu", 1), ("cpu", 1)]


def test_the_length_goes_by_the_acceptance():
    pairs = {"none": pair(None, [10.0]), "gpu": pair("GPU0", [10.0] * 5, 1.0, [1.0] * 5)}
    lengths = {rate: choose(pairs, rate, WORK)[0].n for rate in (0.1, 0.3, 0.6, 1.0)}
    # 0.1: 12/1.1 = 10.9 ms per token, above 10. 0.3: 12/1.3 = 9.23, 13/1.39 = 9.35. 0.6: 15/2.3 = 6.5, 14/2.18 = 6.4.
    assert lengths == {0.1: 0, 0.3: 1, 0.6: 3, 1.0: 4}


def test_a_draft_has_to_be_worth_more_than_predictions_err():
    """4 % faster by prediction is none; 6 % is."""

    def best(check: float) -> str:
        pairs = {"none": pair(None, [10.0]), "gpu": pair("GPU0", [10.0, check], ttft=1.0, repeat=[0.0, 0.0])}
        return choose(pairs, 0.5, WORK)[0].pair

    assert best(0.96 * 15.0) == "none" and best(0.94 * 15.0) == "gpu"


def test_the_prompt_through_the_draft_counts():
    pairs = {"none": pair(None, [10.0]), "gpu": pair("GPU0", [10.0, 10.0], 1.0, [1.0, 1.0], ttft=500.0)}
    assert choose(pairs, 0.5, WORK)[0].n == 0
    assert choose(pairs, 0.5, replace(WORK, n_generate=1001))[0].n == 1


def test_a_step_of_one_token_is_the_plan_s_own():
    made, machine = plan(), profile(MODEL)
    passes = Passes(MODEL, machine, made)
    work = Workload(*made.predicted.workload, depth=made.planner["params"]["depth"])
    assert passes.check(1, work) == pytest.approx(made.predicted.tpot_s[work.middle])
    assert passes.ttft(work) == pytest.approx(made.predicted.ttft_s[work.n_prompt])
    assert passes.check(1, work) < passes.repeat(5, work) < passes.check(5, work) < 5 * passes.check(1, work)


def test_tokens_checked_together_attend_to_one_cache():
    """A decode step of five sequences reads five caches."""
    made, machine = plan(), profile(MODEL)
    passes, work = Passes(MODEL, machine, made), Workload(512, 128)
    sequences = replace(work, n_parallel=5)
    assert passes.check(5, work) < passes.check(1, sequences)
