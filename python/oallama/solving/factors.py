"""Factors that explain by how much sums differ from what they should be: a ridge regression of logarithms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

_ITERATIONS = 30


def fitted_factors(
    sums: Sequence[Mapping[str, float]],
    observed: Sequence[float],
    weights: Sequence[float] | None = None,
    *,
    spread: float = 0.35,
    noise: float = 0.05,
) -> dict[str, float]:
    """A factor per term, so that each sum of its terms times their factors is about what was observed.

    Minimises the squares of log(sum / observed) / noise and of log(factor) / spread. So a term that few sums have, or
    that is a small part of them, keeps a factor near 1, and terms that always come together share what they miss.

    Args:
        sums: by observation, the expected seconds of each term (0 and more; one above 0 at least).
        observed: seconds, above 0.
        weights: of the observations; default: all 1.
        spread: how far a factor is expected to be from 1, as a logarithm.
        noise: how far two observations of one thing differ, as a logarithm.

    Returns:
        The terms that occur, each with its factor; none for no observations.

    >>> fitted_factors([{"a": 1.0}], [2.0])["a"]
    1.97...
    """
    names = sorted({name for terms in sums for name in terms})
    if not names or not len(observed):
        return {}
    a = np.array([[terms.get(name, 0.0) for name in names] for terms in sums])
    y = np.log(np.asarray(observed, dtype=float))
    w = np.ones(len(y)) if weights is None else np.asarray(weights, dtype=float)
    x = np.zeros(len(names))
    for _ in range(_ITERATIONS):
        parts = a * np.exp(x)
        total = parts.sum(axis=1)
        jacobian = parts / total[:, None]
        error = np.log(total) - y
        slope = jacobian.T @ (w * error) / noise**2 + x / spread**2
        curve = (jacobian.T * w) @ jacobian / noise**2 + np.eye(len(x)) / spread**2
        step = np.linalg.solve(curve, slope)
        x -= np.clip(step, -1.0, 1.0)
        if np.abs(step).max() < 1e-9:
            break
    return dict(zip(names, np.exp(x).tolist(), strict=True))
