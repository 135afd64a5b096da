"""From the records of a run to numbers: latencies, throughput, and what of it met a service level objective (SLO).

A request is measured when it was due after the warm-up. Latencies count from when a request was due, so what the
generator was late by is in them, and so is waiting for a connection.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from .drive import Record, Run

PERCENTILES = (50, 90, 95, 99)


@dataclass(frozen=True)
class Percentiles:
    """Mean and percentiles of n values, interpolated linearly; the unit is that of the values."""

    n: int
    mean: float
    p50: float
    p90: float
    p95: float
    p99: float


def percentiles(values: Sequence[float]) -> Percentiles | None:
    """None when there are no values."""
    if not len(values):
        return None
    found = (float(value) for value in np.percentile(values, PERCENTILES))
    return Percentiles(len(values), float(np.mean(values)), *found)


@dataclass(frozen=True)
class Slo:
    """What a request has to meet, in seconds; None: anything will do."""

    ttft_s: float | None = None
    tpot_s: float | None = None

    def met(self, record: Record) -> bool:
        """Whether the request was answered to its end and in time; one token has no TPOT to miss."""
        if record.answer.outcome != "completed":
            return False
        late = self.ttft_s is not None and ttft(record) > self.ttft_s
        slow = self.tpot_s is not None and (tpot(record) or 0.0) > self.tpot_s
        return not late and not slow


def ttft(record: Record) -> float:
    """Seconds from when the request was due until its first text; of one without any text, until its end."""
    first, *_ = [*record.answer.text_s, record.answer.end_s]
    assert first is not None
    return first - record.request.due_s


def e2e(record: Record) -> float:
    """Seconds from when a completed request was due until its last token."""
    return _last(record) - record.request.due_s


def n_tokens(record: Record) -> int:
    """Tokens of the answer as the server counts them, else chunks with text."""
    counted = record.answer.n_answer
    return len(record.answer.text_s) if counted is None else counted


def tpot(record: Record) -> float | None:
    """(last - first) / (n - 1) of a completed request of n tokens, as in vLLM's benchmark; None for one token."""
    n = n_tokens(record)
    return (e2e(record) - ttft(record)) / (n - 1) if n > 1 else None


def itl(record: Record) -> list[float]:
    """The gaps between chunks with text. A chunk is a token, but for characters that take several of them."""
    return [b - a for a, b in pairwise(record.answer.text_s)]


def _last(record: Record) -> float:
    return record.answer.text_s[-1] if record.answer.end_s is None else record.answer.end_s


@dataclass(frozen=True)
class Summary:
    """One model's part of a run.

    Attributes:
        rate: requests per second that were asked for.
        sent, completed, refused, failed, unfinished: measured requests; the last four add up to the first. Refused are
            those the server was too busy for to the end, unfinished those that the client gave up.
        retry_after: measured requests that were refused with a Retry-After, once at least; n_retries: sent again.
        errors: what failed and refused requests were told, and how often.
        asked_prompt, asked_answer: mean tokens that were asked for; n_prompt, n_answer: that the server counted, of
            completed requests.
        short: completed requests whose answers have fewer tokens than was asked for.
        cached: share of the prompts' tokens that the server had in a cache.
        ttft_s, tpot_s, itl_s, e2e_s: of completed measured requests.
        requests_per_s: answers whose end came within the measured time; tokens_out_per_s: tokens that came in it;
            tokens_in_per_s: tokens of the prompts whose first answer did. Of all requests, those of the warm-up too.
        attainment: share of the measured requests that met the SLO; good_requests_per_s, good_tokens_per_s: they and
            their answers' tokens, by when they were due.
    """

    model: str
    rate: float
    sent: int
    completed: int
    refused: int
    failed: int
    unfinished: int
    retry_after: int
    n_retries: int
    errors: dict[str, int]
    asked_prompt: float
    asked_answer: float
    n_prompt: float | None
    n_answer: float | None
    short: int
    cached: float
    ttft_s: Percentiles | None
    tpot_s: Percentiles | None
    itl_s: Percentiles | None
    e2e_s: Percentiles | None
    requests_per_s: float
    tokens_in_per_s: float
    tokens_out_per_s: float
    attainment: float
    good_requests_per_s: float
    good_tokens_per_s: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def measured(run: Run) -> list[Record]:
    """The records that count: due after the warm-up and before the run ended."""
    return [record for record in run.records if run.load.warmup_s <= record.request.due_s < run.end_s]


def summarize(run: Run, slo: Slo) -> list[Summary]:
    """One summary a model, in the order of the load's targets; without a measured request a model has none."""
    found = []
    for target in run.load.targets:
        mine = [record for record in measured(run) if record.request.model == target.model]
        if mine:
            every = [record for record in run.records if record.request.model == target.model]
            found.append(_summary(target.model, target.rate, mine, every, (run.load.warmup_s, run.end_s), slo))
    return found


def _summary(
    model: str, rate: float, mine: list[Record], every: list[Record], window: tuple[float, float], slo: Slo
) -> Summary:
    outcomes = Counter(record.answer.outcome for record in mine)
    done = [record for record in mine if record.answer.outcome == "completed"]
    good = [record for record in done if slo.met(record)]
    seconds = window[1] - window[0]
    ended = [record for record in every if record.answer.outcome == "completed"]
    answered = [record for record in every if record.answer.text_s or record.answer.end_s is not None]
    counted = [record for record in done if record.answer.n_prompt is not None]
    prompt_tokens = sum(record.answer.n_prompt or 0 for record in counted)
    return Summary(
        model=model,
        rate=rate,
        sent=len(mine),
        completed=len(done),
        refused=outcomes["refused"],
        failed=outcomes["failed"],
        unfinished=outcomes["unfinished"],
        retry_after=sum(any(wait is not None for wait in record.refusals) for record in mine),
        n_retries=sum(max(0, len(record.refusals) - (record.answer.outcome == "refused")) for record in mine),
        errors=dict(Counter(record.answer.error for record in mine if record.answer.error)),
        asked_prompt=float(np.mean([record.request.n_prompt for record in mine])),
        asked_answer=float(np.mean([record.request.n_answer for record in mine])),
        n_prompt=prompt_tokens / len(counted) if counted else None,
        n_answer=float(np.mean([n_tokens(record) for record in done])) if done else None,
        short=sum(n_tokens(record) < record.request.n_answer for record in done),
        cached=sum(record.answer.n_cached or 0 for record in counted) / max(1, prompt_tokens),
        ttft_s=percentiles([ttft(record) for record in done]),
        tpot_s=percentiles([value for record in done if (value := tpot(record)) is not None]),
        itl_s=percentiles([gap for record in done for gap in itl(record)]),
        e2e_s=percentiles([e2e(record) for record in done]),
        requests_per_s=sum(_within(_last(record), window) for record in ended) / seconds,
        tokens_in_per_s=sum(_prompt_within(record, window) for record in answered) / seconds,
        tokens_out_per_s=sum(_tokens_within(record, window) for record in answered) / seconds,
        attainment=len(good) / len(mine),
        good_requests_per_s=len(good) / seconds,
        good_tokens_per_s=sum(map(n_tokens, good)) / seconds,
    )


def _within(time_s: float, window: tuple[float, float]) -> bool:
    return window[0] <= time_s < window[1]


def _prompt_within(record: Record, window: tuple[float, float]) -> int:
    if not _within(record.request.due_s + ttft(record), window):
        return 0
    counted = record.answer.n_prompt
    return record.request.n_prompt if counted is None else counted


def _tokens_within(record: Record, window: tuple[float, float]) -> float:
    """Tokens of the answer that came in the window: its chunks there stand for equal parts of them."""
    times = record.answer.text_s or [_last(record)]
    return n_tokens(record) * sum(_within(time_s, window) for time_s in times) / len(times)


def lags(run: Run) -> Percentiles | None:
    """By how many seconds requests were sent after they were due."""
    return percentiles([record.sent_s - record.request.due_s for record in run.records if record.sent_s is not None])
