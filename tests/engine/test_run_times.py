"""Predicted and measured speed of a loaded model: llama.cpp's counters, the plan's curves, and when they disagree."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from oallama import Llama, PlacementPlan
from oallama.engine import runtime
from oallama.loading.run_times import MIN_TOKENS, RunTimes
from support.hand_plan import hand_plan

PROMPT = "The quick brown fox jumps over"
SMALL: dict[str, Any] = {"n_threads": 1, "n_threads_batch": 1, "verbose": False}


@pytest.fixture(scope="module")
def model(tiny: Callable[..., Path]) -> Path:
    return tiny("llama", "F16")


@pytest.fixture(scope="module")
def plan(model: Path, rpc: Any) -> PlacementPlan:
    return hand_plan(model, rpc.devices[0])


def run(llm: Llama, n_generate: int) -> int:
    """A prompt and then single tokens, as in a request that ends after exactly so many; returns the prompt's length."""
    tokens = llm.tokenize(PROMPT.encode())
    llm.eval(tokens)
    for _ in range(n_generate):
        llm.sample(temp=0.0)  # waits for the computation, as every sampling does
        llm.eval([tokens[-1]])
    llm.sample(temp=0.0)
    return len(tokens)


def show(thing: Any) -> str:
    console = Console(width=80)
    with console.capture() as captured:
        console.print(thing)
    return captured.get()


def test_nothing_before_a_run(model: Path, plan: PlacementPlan) -> None:
    for arguments in ({}, {"plan": plan}):
        llm = Llama(str(model), **{"n_ctx": 256, **arguments}, **SMALL)
        placement = llm.placement()
        assert placement.times is None and placement.to_dict()["times"] is None
        assert "speed" not in show(placement)
        llm.close()


def test_counters_and_predictions_of_one_request(model: Path, plan: PlacementPlan) -> None:
    llm = Llama(str(model), plan=plan, **SMALL)
    n_prompt = run(llm, 9)
    times = llm.placement().times
    assert (times.n_prompt, times.n_generate) == (n_prompt, 9)
    assert times.prefill_s > 0 and times.tpot_s > 0
    assert times.predicted_prefill_s == pytest.approx(0.01 * n_prompt)
    assert times.predicted_tpot_s == pytest.approx(1.0 + 1e-3 * (n_prompt + 4.5))
    assert llm.placement().times == times, "reading the counters must not reset them"
    again = llm.placement().to_dict()
    assert json.loads(json.dumps(again))["times"]["n_prompt"] == n_prompt and again["times"]["drift"] is None
    text = show(llm.placement())
    assert "speed, tokens/s" in text and max(map(len, text.splitlines())) <= 80
    llm.reset()
    run(llm, 5)
    times = llm.placement().times
    assert (times.n_prompt, times.n_generate) == (2 * n_prompt, 14), "counters add up over requests"
    # The cache holds the last request only: the prompt of both is as long as it can be, the depth somewhere inside.
    assert times.predicted_prefill_s == pytest.approx(0.02 * n_prompt)
    assert 1.0 < times.predicted_tpot_s < 1.0 + 1e-3 * (n_prompt + 5)
    llm.close()


def test_no_prediction_for_prompts_shorter_than_any_predicted(model: Path, plan: PlacementPlan) -> None:
    later = replace(plan, predicted=replace(plan.predicted, ttft_s={1000: 10.0}))
    llm = Llama(str(model), plan=later, **SMALL)
    run(llm, 2)
    times = llm.placement().times
    assert times.prefill_s > 0 and times.predicted_prefill_s is None and times.predicted_tpot_s > 0
    llm.close()


def test_without_a_plan_only_what_was_measured(model: Path) -> None:
    llm = Llama(str(model), n_ctx=256, **SMALL)
    llm.create_completion(PROMPT, max_tokens=2, temperature=0.0)
    times = llm.placement().times
    assert times.tpot_s > 0 and times.predicted_tpot_s is None and times.predicted_prefill_s is None
    assert times.drift() is None and "generation" in show(times)
    llm.close()


def test_no_perf_measures_nothing(model: Path) -> None:
    llm = Llama(str(model), n_ctx=256, no_perf=True, **SMALL)
    llm.create_completion(PROMPT, max_tokens=2, temperature=0.0)
    assert llm.placement().times is None
    llm.close()


def test_counters_are_the_users(model: Path) -> None:
    """A reset by the user is seen; the report asks the same counters."""
    llm = Llama(str(model), n_ctx=256, **SMALL)
    llm.create_completion(PROMPT, max_tokens=4, temperature=0.0)
    runtime.llama_cpp().llama_perf_context_reset(llm.ctx)
    assert llm.placement().times is None
    llm.close()


def times(ratio: float, n_generate: int = MIN_TOKENS) -> RunTimes:
    return RunTimes(10, 0.1, 0.1, n_generate, 0.02 * ratio, 0.02)


@pytest.mark.parametrize(
    ("ratio", "words"), [(1.3, "1.30x slower than predicted"), (0.5, "2.00x faster than predicted")]
)
def test_a_prediction_that_is_off_is_said(ratio: float, words: str) -> None:
    line = times(ratio).drift()
    assert line is not None and words in line and "`oallama profile MODEL.gguf --fresh`" in line
    assert "--fresh" in show(times(ratio)) and times(ratio).to_dict()["drift"] == line


def test_small_differences_and_few_tokens_are_no_drift() -> None:
    assert times(1.14).drift() is None and times(0.88).drift() is None
    assert times(3.0, MIN_TOKENS - 1).drift() is None
    assert times(1.2).drift() is not None and times(1.2).drift(tolerance=0.25) is None


def test_the_table_shows_speeds() -> None:
    text = show(RunTimes(50, 0.5, 0.25, 20, 0.02, None))
    prompt, generation = (
        line.split() for line in text.splitlines() if line.split()[:1] in (["prompt"], ["generation"])
    )
    assert prompt == ["prompt", "50", "200.0", "100.0", "0.50"]
    assert generation == ["generation", "20", "-", "50.0", "-"]
