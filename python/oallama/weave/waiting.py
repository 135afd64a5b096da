"""How long guests wait for a cold model's operators, and which of those to split (docs/sources.md, 4; the paper).

A task that comes at a random moment meets operator i with probability T_i / sum(T), and then waits for what is left of
it, between 0 and T_i. The sender has attention of its own to compute, K seconds, and the guests' attention takes N:
only what exceeds K - N is waited for.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from oallama.errors import OallamaError


def mean_wait(seconds: Sequence[float], slack_s: float = 0.0) -> float:
    """Seconds that a task waits on average beyond `slack_s` (K - N) for operators of these lengths.

    Without slack it is sum(T^2) / (2 sum(T)), the paper's W.
    """
    total = sum(seconds)
    if total <= 0:
        return 0.0
    slack_s = max(0.0, slack_s)
    return sum((t - slack_s) ** 2 for t in seconds if t > slack_s) / (2 * total)


@dataclass(frozen=True)
class Splitting:
    """parts: of each operator. wait_before_s, wait_after_s: the mean wait. cost_s: what the splits add to a pass."""

    parts: tuple[int, ...]
    wait_before_s: float
    wait_after_s: float
    cost_s: float


def split(
    seconds: Sequence[float],
    threshold_s: float,
    *,
    slack_s: float = 0.0,
    part_cost_s: float = 0.0,
    most_parts: Sequence[int] | None = None,
) -> Splitting:
    """Halve the longest operators until a task waits `threshold_s` at most, or none is longer than `slack_s`.

    part_cost_s: of each further part. most_parts: of each operator; 1: it cannot be split. None: as many as it takes.

    Raises:
        OallamaError: times that are negative, or no threshold.
    """
    if threshold_s <= 0 or any(t < 0 for t in seconds):
        raise OallamaError("splitting needs times that are not negative and a threshold above 0 s")
    parts = [1] * len(seconds)
    longest = [(-t, i) for i, t in enumerate(seconds)]
    heapq.heapify(longest)
    total, slack_s = sum(seconds), max(0.0, slack_s)
    # 2 sum(T) W: kept up to date, since a halved operator of p parts counts p times the square of a part's excess.
    excess = sum(max(0.0, t - slack_s) ** 2 for t in seconds)
    while longest and total > 0 and excess / (2 * total) > threshold_s:
        part, i = longest[0]
        part = -part
        if part <= slack_s:
            break
        heapq.heappop(longest)
        if most_parts is not None and 2 * parts[i] > most_parts[i]:
            continue
        excess += parts[i] * (2 * max(0.0, part / 2 - slack_s) ** 2 - (part - slack_s) ** 2)
        parts[i] *= 2
        heapq.heappush(longest, (-part / 2, i))
    left = sum(n * max(0.0, t / n - slack_s) ** 2 for t, n in zip(seconds, parts, strict=True))
    wait_s = left / (2 * total) if total > 0 else 0.0
    return Splitting(tuple(parts), mean_wait(seconds, slack_s), wait_s, part_cost_s * (sum(parts) - len(parts)))
