"""What a comparison found, in sentences: ratios with their intervals, and where predictions were off and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..data.predicted import TIE
from .results import Result
from .stats import Average, Ratio, average_for, speedup

ENOUGH_ROUNDS = 5
NARROW = 0.05
_BUSY_CPUS = 0.1
_OFF = 0.10  # a prediction that differs by more from what was measured is spoken of


def is_narrow(results: Sequence[Result]) -> bool:
    """Whether the interval of every engine's ratio to the first one's is narrower than 5 % of it."""
    alive = [result for result in results if not result.error]
    if len(alive) < 2:
        return True
    if min(len(result.samples) for result in alive) < ENOUGH_ROUNDS:
        return False
    average = _average(alive)
    ratios = [_ratio(other, alive[0], average) for other in alive[1:]]
    return all(ratio and ratio.high - ratio.low < NARROW * ratio.value for ratio in ratios)


def fastest(results: Sequence[Result], preferred: str) -> Result:
    """The result with the least request time; the one of the preferred engine where that is within TIE of it."""
    alive = [result for result in results if result.samples]
    average = _average(alive)
    best = min(alive, key=lambda result: _seconds(result, average))
    ours = next((result for result in alive if result.engine == preferred), best)
    return ours if _seconds(ours, average) <= _seconds(best, average) * (1 + TIE) else best


def verdict(results: Sequence[Result], engine: str, names: Mapping[str, str], who: str = "this plan") -> str:
    """How fast an engine was beside each of the others.

    names: what to call the others, by engine; only they are spoken of. who: what to call the engine.
    """
    ours = next(result for result in results if result.engine == engine)
    average = _average(results)
    others = [(names[result.engine], _ratio(result, ours, average)) for result in results if result.engine in names]
    cell, rounds = ours.cell, len(ours.samples)
    parts = [f"{r.value:.2f}x ({r.low:.2f} to {r.high:.2f}) as fast as {name}" for name, r in others if r]
    request = f"{_seconds(ours, average):.3g} s for {cell.prompt} + {cell.gen} tokens"
    return f"measured in {rounds} rounds, {who} takes {request}: {', '.join(parts)}"


def surprises(
    results: Sequence[Result], engine: str, predicted_s: Mapping[str, float], others_cpus: float
) -> list[str]:
    """A line for each engine whose request was predicted too short or too long, and what it is laid to.

    predicted_s: seconds of the request by engine. others_cpus: CPUs that other programs kept busy meanwhile.
    """
    lines, average = [], _average(results)
    for result in results:
        if result.engine not in predicted_s or not result.samples:
            continue
        seconds, expected = _seconds(result, average), predicted_s[result.engine]
        if abs(seconds / expected - 1) <= _OFF:
            continue
        who = "this plan" if result.engine == engine else result.engine
        lines.append(
            f"{who} was predicted to take {expected:.3g} s and took {seconds:.3g} s: {_why(result, others_cpus)}"
        )
    return lines


def _why(result: Result, others_cpus: float) -> str:
    if others_cpus > _BUSY_CPUS:
        return f"other programs kept {others_cpus:.1f} CPUs busy meanwhile"
    parts = []
    for name, label in (("ttft_s", "the prompt"), ("tpot_s", "a token")):
        found, expected = result.summary(name), getattr(result.prediction, name)
        if found and expected:
            parts.append(f"{label} took {1e3 * found.p50:.1f} ms, {1e3 * expected:.1f} ms predicted")
    spread = result.summary("e2e_s")
    if spread and spread.std > _OFF * spread.p50:
        parts.append("its rounds differ by more than that")
    return "; ".join(parts) or "the profile's times do not hold for it"


def _average(results: Sequence[Result]) -> Average:
    return average_for([result.values("e2e_s") for result in results if result.samples])


def _ratio(other: Result, ours: Result, average: Average) -> Ratio | None:
    return speedup(other.values("e2e_s"), ours.values("e2e_s"), average=average)


def _seconds(result: Result, average: Average) -> float:
    return float(average(result.values("e2e_s")))
