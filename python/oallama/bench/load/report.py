"""JSON lines of a load test, and its latencies as a plot (pip install oallama[plot])."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from oallama.errors import OallamaError

from ...views.load_plot import write_shares
from ..machine import describe, save_lines
from .drive import Load, Record, Run
from .measure import Slo, e2e, itl, lags, measured, n_tokens, percentiles, summarize, tpot, ttft
from .service import Service

PANELS = (("TTFT", lambda record: [ttft(record)]), ("ITL", itl), ("E2E", lambda record: [e2e(record)]))


def head(argv: list[str], service: Service, load: Load, slo: Slo) -> dict[str, Any]:
    """The first line: machine, versions, command and every parameter."""
    lengths = {"name": load.lengths.name, "scale": load.lengths.scale}
    served = {"url": service.url, "chat": service.chat, "exact_prompts": service.exact, "extras": service.extras}
    return {**describe(argv), "service": served, "load": {**_fields(load), "lengths": lengths}, "slo": asdict(slo)}


def _fields(load: Load) -> dict[str, Any]:
    fields = {name: getattr(load, name) for name in load.__dataclass_fields__ if name != "lengths"}
    return {**fields, "targets": {target.model: target.rate for target in load.targets}}


def lines(run: Run, slo: Slo, number: int = 0) -> Iterator[dict[str, Any]]:
    """A line a request, and one of the whole run; `number` tells the runs of a search apart."""
    for record in run.records:
        if record.sent_s is not None:
            yield {"run": number, **of_request(record)}
    yield summary_line(run, slo, number)


def summary_line(run: Run, slo: Slo, number: int = 0) -> dict[str, Any]:
    """What the requests of a run add up to, by model, and how well the generator kept to its schedule."""
    late = lags(run)
    return {
        "run": number,
        "rates": {target.model: target.rate for target in run.load.targets},
        "end": run.end,
        "measured_s": run.end_s - run.load.warmup_s,
        "lag_s": asdict(late) if late else None,
        "n_capped": run.n_capped,
        "cpu_share": run.cpu_share,
        "models": [summary.to_json() for summary in summarize(run, slo)],
    }


def of_request(record: Record) -> dict[str, Any]:
    """A request's record in short: times are seconds, gaps between tokens are summarised."""
    request, answer = record.request, record.answer
    done = answer.outcome == "completed"
    gaps = percentiles(itl(record))
    return {
        **asdict(request),
        "sent_s": record.sent_s,
        "outcome": answer.outcome,
        "error": answer.error,
        "refusals": record.refusals,
        "tokens": [answer.n_prompt, n_tokens(record)],
        "ttft_s": ttft(record) if answer.text_s or done else None,
        "tpot_s": tpot(record) if done else None,
        "e2e_s": e2e(record) if done else None,
        "itl_s": asdict(gaps) if gaps else None,
    }


def write_plot(run: Run, path: str | os.PathLike[str]) -> Path:
    """Draw which share of the requests (ITL: of the gaps) took at most how long, a curve a model.

    Raises:
        OallamaError: without matplotlib, without a completed request, or if the file cannot be written.
    """
    done = [record for record in measured(run) if record.answer.outcome == "completed"]
    if not done:
        raise OallamaError("there is nothing to plot: no request was completed")
    panels = {
        title: {
            f"{target.model}, {target.rate:g}/s": [
                value for record in done if record.request.model == target.model for value in values(record)
            ]
            for target in run.load.targets
        }
        for title, values in PANELS
    }
    return write_shares(panels, path)


def write_lines(path: Path, argv: list[str], service: Service, load: Load, slo: Slo, runs: Sequence[Run]) -> None:
    """All of a test: the head, then the lines of every run. Raises OallamaError if the file cannot be written."""
    every = [head(argv, service, load, slo), *(line for i, run in enumerate(runs) for line in lines(run, slo, i))]
    try:
        save_lines(every, path)
    except OSError as error:
        raise OallamaError(f"cannot write {path}: {error.strerror}") from None
