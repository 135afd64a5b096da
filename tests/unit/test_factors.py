"""Factors that explain sums of terms."""

from __future__ import annotations

import numpy as np
import pytest

from oallama.solving.factors import fitted_factors


def test_one_term_takes_all_of_its_error() -> None:
    assert fitted_factors([{"a": 2.0}] * 3, [3.0] * 3)["a"] == pytest.approx(1.5, rel=0.02)


def test_terms_that_always_come_together_share_what_they_miss() -> None:
    found = fitted_factors([{"a": 1.0, "b": 1.0}] * 5, [3.0] * 5)
    assert found["a"] == pytest.approx(found["b"]) and found["a"] == pytest.approx(1.5, rel=0.02)


def test_a_term_that_weighs_nothing_is_left_alone() -> None:
    found = fitted_factors([{"a": 1.0, "b": 1e-4}] * 5, [2.0] * 5)
    assert found["b"] == pytest.approx(1.0, abs=0.01)


def test_nothing_to_learn_from() -> None:
    assert fitted_factors([], []) == {}


def test_factors_of_several_terms_are_found_from_sums_that_differ() -> None:
    rng = np.random.default_rng(5)
    true = {"CPU matrices": 0.6, "RPC0 matrices": 1.6, "RPC0 changes": 1.3}
    sums = [{name: float(rng.uniform(0.1, 1.0)) for name in true} for _ in range(12)]
    observed = [sum(s * true[name] for name, s in terms.items()) * rng.normal(1, 0.01) for terms in sums]
    found = fitted_factors(sums, observed)
    for name, factor in true.items():
        assert found[name] == pytest.approx(factor, rel=0.15)
