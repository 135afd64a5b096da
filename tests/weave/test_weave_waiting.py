"""The waiting-time model of guests and the paper's splitting, against a simulation and brute force."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oallama.errors import OallamaError
from oallama.weave.waiting import mean_wait, split

times = st.lists(st.floats(1e-6, 1e-1), min_size=1, max_size=20)


@given(times, st.floats(0, 0.05))
def test_the_mean_wait_is_a_random_moments(seconds: list[float], slack: float) -> None:
    ends = np.cumsum(seconds)
    moments = (np.arange(200_000) + 0.5) / 200_000 * ends[-1]
    left = ends[np.searchsorted(ends, moments)] - moments
    waits = np.maximum(0.0, left - slack)
    assert mean_wait(seconds, slack) == pytest.approx(waits.mean(), rel=0.02, abs=1e-7)


@given(times, st.floats(1e-7, 1e-2), st.floats(0, 0.01))
def test_splitting_reaches_the_threshold_or_the_slack(seconds: list[float], threshold: float, slack: float) -> None:
    found = split(seconds, threshold, slack_s=slack, part_cost_s=1e-6)
    lengths = [t / n for t, n in zip(seconds, found.parts, strict=True)]
    assert found.wait_after_s <= threshold * (1 + 1e-9) or max(lengths) <= slack
    assert found.wait_before_s == mean_wait(seconds, slack) and found.wait_after_s <= found.wait_before_s
    assert found.cost_s == pytest.approx(1e-6 * (sum(found.parts) - len(seconds)))
    # The longest first: whatever was halved was, before it, at least as long as any part that is left.
    halved = [2 * length for length, n in zip(lengths, found.parts, strict=True) if n > 1]
    assert not halved or min(halved) >= max(lengths) * (1 - 1e-9)


def test_one_step_less_does_not_reach_it() -> None:
    seconds = [8e-3, 1e-3, 4e-3]
    found = split(seconds, 1.5e-3)
    assert found.parts == (4, 1, 1)
    assert found.wait_before_s == pytest.approx(81 / 26 * 1e-3) and found.wait_after_s == pytest.approx(33 / 26 * 1e-3)
    assert mean_wait([4e-3, 4e-3, 1e-3, 4e-3]) > 1.5e-3


def test_an_operator_is_split_so_often_at_most() -> None:
    found = split([1.0, 1.0, 1e-3], 1e-6, most_parts=[8, 1, 1])
    assert found.parts == (8, 1, 1) and found.wait_after_s > 1e-6


def test_no_operators_and_bad_input() -> None:
    assert mean_wait([]) == 0.0 and split([], 1e-3).parts == ()
    with pytest.raises(OallamaError, match="a threshold above 0 s"):
        split([1.0], 0.0)
    with pytest.raises(OallamaError, match="not negative"):
        split([-1.0], 1.0)
