"""When requests come: a Poisson process for each model, the same for the same seed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from oallama.errors import OallamaError

from .lengths import Lengths

BLOCK = 256
MOST_REQUESTS = 1_000_000


@dataclass(frozen=True)
class Target:
    """A model and how many requests per second are sent to it, on average."""

    model: str
    rate: float


@dataclass(frozen=True)
class Request:
    """One request: due_s seconds after the start; n_prompt and n_answer are the tokens that are wanted."""

    number: int
    model: str
    due_s: float
    n_prompt: int
    n_answer: int


def poisson(rate: float, duration_s: float, rng: np.random.Generator) -> np.ndarray:
    """Times in [0, duration_s) of a Poisson process with `rate` events per second; half the rate doubles the times."""
    gaps = np.empty(0)
    while gaps.sum() < rate * duration_s:
        gaps = np.concatenate([gaps, rng.exponential(size=BLOCK)])
    times = np.cumsum(gaps) / rate
    return times[times < duration_s]


def schedule(targets: Sequence[Target], lengths: Lengths, duration_s: float, seed: int) -> list[Request]:
    """All requests of a run in the order of their times, numbered from 0.

    Every model has random numbers of its own: another rate or one more model changes neither the lengths nor the
    pattern of the others' arrivals.

    Raises:
        OallamaError: a rate or the duration is not above 0, they make a million requests, or a model is named twice.
    """
    names = [target.model for target in targets]
    for target in targets:
        if not (target.rate > 0 and duration_s > 0 and target.rate * duration_s < MOST_REQUESTS):
            wanted = "rates and durations are above 0 and make less than a million requests"
            raise OallamaError(f"{wanted}; got {target.rate:g}/s during {duration_s:g} s")
        if names.count(target.model) > 1:
            raise OallamaError(f"the model {target.model} is given twice; give it one rate")
    found: list[tuple[float, str, int, int]] = []
    for number, target in enumerate(targets):
        of_times, of_lengths = (np.random.default_rng([seed, number, what]) for what in (0, 1))
        times = poisson(target.rate, duration_s, of_times)
        pairs = lengths.draw(of_lengths, len(times))
        found += [(float(t), target.model, int(p), int(a)) for t, (p, a) in zip(times, pairs, strict=True)]
    return [Request(number, model, due, p, a) for number, (due, model, p, a) in enumerate(sorted(found))]
