"""Interpolation over measured points (x, seconds), sorted by x. Pure functions; every result is >= 0."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

Points = Sequence[tuple[int, float]]

# Below this a median is the timer's noise; it also keeps logarithms finite.
SHORTEST_S = 1e-9
# Tokens from which on each further one takes about as long: bench/results/2026-11-25-products.jsonl, 128 of 32 and 512.
MANY = 32


class Estimate(NamedTuple):
    """A time and where it comes from: "measured", "interpolated" (between measured points) or "scaled"."""

    seconds: float
    source: str


def log_log(points: Points, x: float) -> float:
    """Seconds at `x`, a straight line between neighbours in log-log space.

    Outside the measured range the nearest segment goes on, its exponent held in [0, 1]: a matrix multiplication over
    more tokens is never faster, and never slower than one per token. A single point counts as compute-bound above
    (proportional) and memory-bound below (constant).
    """
    if len(points) == 1:
        (x0, t0), slope = points[0], 1.0 if x > points[0][0] else 0.0
        return t0 * (x / x0) ** slope
    at = min(max(bisect_left([p[0] for p in points], x), 1), len(points) - 1)
    (x0, t0), (x1, t1) = points[at - 1], points[at]
    slope = math.log(max(t1, SHORTEST_S) / max(t0, SHORTEST_S)) / math.log(x1 / x0)
    if x0 <= x <= x1:
        return max(t0, SHORTEST_S) * (x / x0) ** slope
    slope = min(max(slope, 0.0), 1.0)
    near_x, near_t = points[0] if x < points[0][0] else points[-1]
    return near_t * (x / near_x) ** slope


def per_token(points: Points, n_tokens: int) -> float:
    """`log_log`; between points of `MANY` tokens or more linear, above the last point each token costs its part of it.

    With few tokens weights are read once for all of them; with many, computing takes the time (rooflines).
    """
    last, seconds = points[-1]
    if n_tokens > last:
        return seconds * n_tokens / last
    many = [point for point in points if point[0] >= MANY]
    return piecewise_linear(many, n_tokens) if many and n_tokens >= many[0][0] else log_log(points, n_tokens)


def estimate_at(points: Points, n_tokens: int) -> Estimate:
    """`per_token`, and whether that very point was measured."""
    for n, seconds in points:
        if n == n_tokens:
            return Estimate(seconds, "measured")
    inside = points[0][0] < n_tokens < points[-1][0]
    return Estimate(per_token(points, n_tokens), "interpolated" if inside else "scaled")


def piecewise_linear(points: Points, x: float) -> float:
    """Seconds at `x`, linear between neighbours; constant below the first point, the last slope (>= 0) above the last.

    A single point scales proportionally above itself.
    """
    x0, t0 = points[0]
    if x <= x0:
        return t0
    if len(points) == 1:
        return t0 * x / x0 if x0 > 0 else t0
    at = min(bisect_left([p[0] for p in points], x), len(points) - 1)
    (x0, t0), (x1, t1) = points[at - 1], points[at]
    slope = (t1 - t0) / (x1 - x0)
    if x > x1:
        return t1 + max(slope, 0.0) * (x - x1)
    return t0 + slope * (x - x0)


def linear_from_zero(points: Points, x: float) -> float:
    """`piecewise_linear`, but below the first point its segment goes on: never above that point's seconds, never below
    their share x / x0.
    """
    if len(points) == 1 or x >= points[0][0]:
        return piecewise_linear(points, x)
    (x0, t0), (x1, t1) = points[:2]
    return min(t0, max(t0 - (t1 - t0) / (x1 - x0) * (x0 - x), t0 * x / x0))
