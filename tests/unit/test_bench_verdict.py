"""What a comparison says of itself."""

from __future__ import annotations

import numpy as np
import pytest

from oallama.bench.results import Cell, ExpectedTimes, Result, Sample
from oallama.bench.stats import expected_range
from oallama.bench.verdict import ENOUGH_ROUNDS, fastest, is_narrow, surprises, verdict

CELL = Cell(0, 64, 11)


def result(engine: str, seconds: list[float], prediction: ExpectedTimes | None = None) -> Result:
    """Requests that take so long, half of it for the prompt."""
    samples = [
        Sample(i, tuple(s / 2 + s / 2 * token / 10 for token in range(11)), (1,) * 11) for i, s in enumerate(seconds)
    ]
    return Result(engine, "", CELL, False, {}, {}, "", None, None, prediction or ExpectedTimes(), {}, samples=samples)


STEADY = [1.0, 1.01, 1.0, 0.99, 1.0, 1.01]


def test_rounds_go_on_until_the_interval_is_narrow() -> None:
    twice = [2 * s for s in STEADY]
    assert is_narrow([result("a", STEADY), result("b", twice)])
    few = ENOUGH_ROUNDS - 1
    assert not is_narrow([result("a", STEADY[:few]), result("b", twice[:few])])
    assert not is_narrow([result("a", STEADY), result("b", [1.0, 2.0, 3.0, 1.0, 2.0, 3.0])])


def test_engines_that_failed_are_not_waited_for() -> None:
    gone = result("b", [])
    gone.error = "no memory"
    assert is_narrow([result("a", STEADY), gone])


def test_the_verdict_is_what_was_measured() -> None:
    results = [result("ours", STEADY), result("x", [1.5 * s for s in STEADY]), result("y", [0.8 * s for s in STEADY])]
    said = verdict(results, "ours", {"x": "the layer split", "y": "the CPU alone"})
    assert "6 rounds" in said and "1 s for 64 + 11 tokens" in said
    assert "1.50x (1.50 to 1.50) as fast as the layer split" in said
    assert "0.80x (0.80 to 0.80) as fast as the CPU alone" in said


@pytest.mark.parametrize(("others_cpus", "why"), [(0.0, "50.0 ms, 30.0 ms predicted"), (0.8, "0.8 CPUs busy")])
def test_a_prediction_that_was_off_is_spoken_of(others_cpus: float, why: str) -> None:
    results = [result("ours", STEADY, ExpectedTimes(0.5, 0.03)), result("x", STEADY)]
    (line,) = surprises(results, "ours", {"ours": 0.8, "x": 1.02}, others_cpus)
    assert "this plan was predicted to take 0.8 s and took 1 s" in line and why in line


def test_what_is_kept_is_the_fastest_and_ours_where_they_are_level() -> None:
    ours, level, better = (result(name, [f * s for s in STEADY]) for name, f in (("o", 1.0), ("l", 0.99), ("b", 0.9)))
    assert fastest([ours, level], "o") is ours
    assert fastest([ours, level, better], "o") is better


def test_rounds_beside_bursts_are_compared_by_their_means() -> None:
    ours, bursty = result("ours", STEADY), result("x", [0.8, 0.8, 0.8, 0.8, 3.0, 3.0])
    assert fastest([bursty, ours], "x") is ours
    assert "1.53x" in verdict([ours, bursty], "ours", {"x": "the layer split"})


def test_one_more_value_is_expected_in_a_range_as_wide_as_the_values_differ() -> None:
    assert expected_range([1.0] * 100) == pytest.approx((1 / 1.1, 1.1), rel=0.01)
    assert expected_range([2.0]) == pytest.approx((2 / 1.643, 2 * 1.643), rel=1e-3)
    few, many = expected_range([1.0, 1.2]), expected_range([1.0, 1.2] * 10)
    assert few[0] < many[0] < 1.0 < 1.2 < many[1] < few[1]
    assert few[1] / few[0] < 2.3, "two values say something"


def test_rounds_beside_other_work_tell_less_of_later() -> None:
    quiet, busy = expected_range([1.0] * 100), expected_range([1.0] * 100, beside_others=True)
    assert busy == pytest.approx((1 / 1.4, 1.4), rel=0.01) and busy[0] < quiet[0] < quiet[1] < busy[1]


@pytest.mark.parametrize(("n", "spread", "share"), [(1, 0.1, 0.95), (2, 0.1, 0.95), (5, 0.1, 0.93), (5, 0.3, 0.87)])
def test_ranges_hold_the_next_value(n: int, spread: float, share: float) -> None:
    rng = np.random.default_rng(1)
    inside = 0
    for _ in range(4000):
        *seen, later = np.exp(rng.normal(0, spread, n + 1))
        least, most = expected_range(seen)
        inside += least <= later <= most
    assert inside >= share * 4000
