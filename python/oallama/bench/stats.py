"""Statistics of latencies: TPOT and ITL as vLLM's benchmark defines them, summaries, and ratios with an interval."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import numpy as np

PERCENTILES = (50, 90, 99)
RESAMPLES = 2000


def tpot(token_times_s: Sequence[float]) -> float | None:
    """Time per output token after the first, (E2E - TTFT) / (n_out - 1); None with a single token.

    token_times_s: seconds from the start of prompt processing to each token, the first being the TTFT.
    """
    n_out = len(token_times_s)
    return (token_times_s[-1] - token_times_s[0]) / (n_out - 1) if n_out > 1 else None


def itl(token_times_s: Sequence[float]) -> list[float]:
    """Inter-token latencies: the gaps between tokens, so without the first token."""
    return [b - a for a, b in pairwise(token_times_s)]


@dataclass(frozen=True)
class Summary:
    """Median and tails of one latency; the unit is that of the samples, std is the sample deviation (n - 1)."""

    n: int
    p50: float
    p90: float
    p99: float
    mean: float
    std: float
    min: float

    def to_json(self) -> dict[str, float]:
        return asdict(self)


def summarize(values: Sequence[float]) -> Summary | None:
    """Summary of the values, percentiles interpolated linearly; None when there are none."""
    if not len(values):
        return None
    x = np.asarray(values, dtype=float)
    p50, p90, p99 = (float(v) for v in np.percentile(x, PERCENTILES))
    std = float(x.std(ddof=1)) if len(x) > 1 else 0.0
    return Summary(len(x), p50, p90, p99, float(x.mean()), std, float(x.min()))


# Student's t at 97.5 % by degrees of freedom; more have the last.
_T = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.13, 2.09, 2.04)
_NORMAL = 1.96
# Standard deviations of logarithms. How far values lie apart, where they are too few to tell: as if so many more
# degrees of freedom had told of it. In bench/results/2026-11-29-busy-plans.jsonl.gz it is 0.09 to 0.14 by load.
_BEFORE, _APART = 2, 0.08
# How far the same request lies from their mean minutes later. On a quiet machine 0.05 (2026-11-24-busy-plans.jsonl.gz,
# an EPYC) and 0.10 (2026-11-29, a Xeon; its rounds were few, so its ranges held). Beside memory copies 0.18 (the Xeon).
_LATER, _LATER_BESIDE_OTHERS = 0.05, 0.17


def expected_range(values: Sequence[float], beside_others: bool = False) -> tuple[float, float]:
    """The interval in which one more value is expected with 95 % probability, if their logarithms are normal.

    At least 10 % to both sides, 40 % where the values were taken beside other work: seconds of measuring do not tell
    how fast the machine is minutes later. Of a single value a factor of 1.64. Where values lie far apart, it is too
    narrow: of five with a standard deviation of 30 % it holds nine in ten. values: above 0, one at least.
    """
    x = np.log(np.asarray(values, dtype=float))
    degrees = _BEFORE + len(x) - 1
    variance = (_BEFORE * _APART**2 + float(((x - x.mean()) ** 2).sum())) / degrees
    t = _T[min(degrees, len(_T)) - 1]
    later = _LATER_BESIDE_OTHERS if beside_others else _LATER
    factor = math.exp(math.hypot(t * math.sqrt(variance * (1 + 1 / len(x))), _NORMAL * later))
    middle = math.exp(float(x.mean()))
    return middle / factor, middle * factor


UNSTEADY = 0.25
Average = Callable[..., Any]


def is_unsteady(values: Sequence[float]) -> bool:
    """Whether values differ by a quarter of their median, from the 10th percentile to the 90th."""
    p10, p50, p90 = np.percentile(values, (10, 50, 90))
    return bool(p90 - p10 > UNSTEADY * p50)


def average_for(series: Sequence[Sequence[float]]) -> Average:
    """What series of rounds are compared by: the mean where one of them is unsteady, else the median.

    Other work that comes and goes makes rounds of two kinds. Their median is of one kind, by chance; their mean counts
    both as often as they came.
    """
    return np.mean if any(map(is_unsteady, series)) else np.median


@dataclass(frozen=True)
class Ratio:
    """A ratio of averages with its 95 % interval."""

    value: float
    low: float
    high: float

    def to_json(self) -> dict[str, float]:
        return asdict(self)


def speedup(
    baseline: Sequence[float], measured: Sequence[float], seed: int = 0, average: Average = np.median
) -> Ratio | None:
    """How many times faster `measured` is: average(baseline) / average(measured), interval by bootstrap.

    Samples of equal number are taken as interleaved rounds and resampled in pairs, so that a drift of the machine
    that hit both counts for neither. None when one of them is empty.

    >>> speedup([2.0, 2.0], [1.0, 1.0]).value
    2.0
    """
    if not len(baseline) or not len(measured):
        return None
    a, b = np.asarray(baseline, dtype=float), np.asarray(measured, dtype=float)
    rng = np.random.default_rng(seed)
    pick_a = rng.integers(len(a), size=(RESAMPLES, len(a)))
    pick_b = pick_a if len(a) == len(b) else rng.integers(len(b), size=(RESAMPLES, len(b)))
    ratios = average(a[pick_a], axis=1) / average(b[pick_b], axis=1)
    low, high = (float(v) for v in np.percentile(ratios, (2.5, 97.5)))
    return Ratio(float(average(a) / average(b)), low, high)
