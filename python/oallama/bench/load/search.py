"""The highest rate at which a service level objective is still met, by bisection over a few runs."""

from __future__ import annotations

import math
from collections.abc import Callable

BRACKET = 2.0


def highest(meets: Callable[[float], bool], n_runs: int, precision: float = 1.05) -> tuple[float | None, float | None]:
    """Factors (a, b) on a rate: `meets(a)` was true, `meets(b)` was not, and a < b.

    Starts with factor 1, doubles or halves it until there is one of either kind, then tries the geometric mean.

    Args:
        meets: measures with rates multiplied by a factor.
        n_runs: most measurements.
        precision: b / a at which the search ends.

    Returns:
        None in place of a factor of which there was none within n_runs.

    >>> highest(lambda factor: factor <= 3, n_runs=5)
    (2.8284271247461903, 3.363585661014858)
    """
    good: float | None = None
    bad: float | None = None
    factor = 1.0
    for _ in range(n_runs):
        if meets(factor):
            good = factor
        else:
            bad = factor
        if good is None:
            factor /= BRACKET
        elif bad is None:
            factor *= BRACKET
        elif bad / good <= precision:
            break
        else:
            factor = math.sqrt(good * bad)
    return good, bad
