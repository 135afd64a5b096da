"""`oallama bench serve`: a load generator for servers of the OpenAI API."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from oallama.base.printing import print_json, say
from oallama.errors import OallamaError
from oallama.views.load import highest, latencies_table, remarks, requests_table, search_table

from .groups import grouped
from .options import Json
from .terminal import out, progress_bar, warn_if_busy

if TYPE_CHECKING:  # imported by the command itself: other commands need no HTTP client
    from oallama.bench.load import Load, Run, Service, Slo, Target


@dataclass(frozen=True)
class Traffic:
    """What is sent, and how."""

    lengths: Annotated[
        str, typer.Option(help="burstgpt, azure-conv, PROMPT:ANSWER in tokens, or a CSV or JSONL file of pairs.")
    ] = "burstgpt"
    scale: Annotated[float, typer.Option(help="Factor on lengths: below 1 for a slow machine.")] = 1.0
    duration: Annotated[float, typer.Option(help="Seconds that are measured.")] = 60.0
    warmup: Annotated[float, typer.Option(min=0.0, help="Seconds before them, whose requests do not count.")] = 5.0
    drain: Annotated[float, typer.Option(min=0.0, help="Most seconds to wait for answers afterwards.")] = 30.0
    seed: Annotated[int, typer.Option(min=0, help="Seed of arrivals and lengths.")] = 0
    chat: Annotated[bool, typer.Option("--chat", help="Ask /v1/chat/completions, not /v1/completions.")] = False
    retry: Annotated[bool, typer.Option("--retry", help="Send refused requests again after their Retry-After.")] = False
    connections: Annotated[int, typer.Option(min=1, help="Most requests under way at once.")] = 512


@dataclass(frozen=True)
class Objective:
    """What answers should meet, and the search for the highest rates that do."""

    slo_ttft: Annotated[float | None, typer.Option(help="Objective: seconds until the first token.")] = None
    slo_tpot: Annotated[float | None, typer.Option(help="Objective: seconds for every token after it.")] = None
    search_rate: Annotated[
        bool, typer.Option("--search-rate", help="Find the highest rates, in this ratio, that meet the objective.")
    ] = False
    attainment: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Share of each model's requests that has to meet it.")
    ] = 0.9
    runs: Annotated[int, typer.Option(min=2, help="Most runs of --search-rate.")] = 8


@grouped
def bench_serve(
    url: Annotated[str, typer.Option(help="Address of the server.")] = "http://127.0.0.1:8080",
    model: Annotated[
        list[str] | None, typer.Option(metavar="NAME=RATE", help="A model and its requests per second; repeatable.")
    ] = None,
    rate: Annotated[
        float | None, typer.Option(help="In place of --model: requests per second to the only one. Default 1.")
    ] = None,
    *,
    traffic: Traffic,
    objective: Objective,
    output: Annotated[Path | None, typer.Option("-o", "--out", help="File for JSON lines, one a request.")] = None,
    plot: Annotated[Path | None, typer.Option(help="File for a plot (PNG) of the latencies.")] = None,
    json: Json = False,
) -> None:
    """Send requests to a server of the OpenAI API as users would, and measure its answers.

    Arrivals are random (Poisson) and do not wait for earlier answers. docs/serving.md says what the numbers mean.
    """
    from oallama.bench import load as generator

    slo = generator.Slo(objective.slo_ttft, objective.slo_tpot)
    if objective.search_rate and slo == generator.Slo():
        raise OallamaError("--search-rate needs an objective: --slo-ttft, --slo-tpot or both")
    if model and rate is not None:
        raise OallamaError("--rate takes the place of --model NAME=RATE; give one of them")
    distribution = generator.parse_lengths(traffic.lengths, traffic.scale)
    targets = tuple(_target(text) for text in model or ())
    waiting = cache(lambda what: say(f"waiting for {what} to be loaded"))  # said once
    service = generator.reach(url, [target.model for target in targets] or None, chat=traffic.chat, waiting=waiting)
    load = generator.Load(
        targets or tuple(generator.Target(name, 1.0 if rate is None else rate) for name in service.prompts),
        distribution,
        duration_s=traffic.duration,
        warmup_s=traffic.warmup,
        drain_s=traffic.drain,
        seed=traffic.seed,
        connections=traffic.connections,
        retry=traffic.retry,
    )
    warn_if_busy()
    done: list[Run] = []
    found = ended = None
    try:
        if objective.search_rate:
            share = objective.attainment
            found = generator.highest(
                lambda factor: _meets(service, load.faster(factor), slo, share, done), objective.runs
            )
        else:
            _measure(service, load, done)
    except (KeyboardInterrupt, OallamaError) as error:
        if not done:
            raise
        ended = error
    good = found and found[0]
    best = next((run for run in done if good and run.load == load.faster(good)), done[-1])
    if output:
        generator.write_lines(output, sys.argv, service, load, slo, done)
    if json:
        print_json([generator.summary_line(run, slo, number) for number, run in enumerate(done)])
    else:
        summaries = generator.summarize(best, slo)
        if summaries:
            out.print(requests_table(summaries, best, slo))
            out.print(latencies_table(summaries))
        else:
            say("no request was due yet that counts; the first seconds are the warm-up")
        if objective.search_rate:
            out.print(search_table([(run, generator.summarize(run, slo)) for run in done]))
        if found:
            out.print(highest(load, *found, objective.attainment))
        if output:
            out.print(f"written: {output}", soft_wrap=True)
    if plot:
        generator.write_plot(best, plot)
    for remark in remarks(best, generator.summarize(best, slo), generator.lags(best)):
        say(f"note: {remark}")
    if ended:
        raise ended
    if not any(of.completed for of in generator.summarize(best, slo)):
        raise OallamaError(f"no request was completed; the server at {service.url} answered, but not these requests")


def _target(text: str) -> Target:
    from oallama.bench.load import Target

    name, _, rate = text.rpartition("=")
    try:
        return Target(name, float(rate))
    except ValueError:
        raise OallamaError(f"--model is NAME=RATE, as big=0.5 for a request every two seconds; got {text!r}") from None


def _measure(service: Service, load: Load, done: list[Run]) -> Run:
    """One run, which is added to `done`. Raises KeyboardInterrupt or OallamaError if it ended early."""
    from oallama.bench.load import drive

    rates = ", ".join(f"{target.rate:.3g}/s" for target in load.targets)
    with progress_bar(f"run {len(done) + 1}: {rates}") as report:
        run = drive(service, load, report)
    done.append(run)
    if run.end == "interrupted":
        raise KeyboardInterrupt
    if run.end == "server gone":
        raise OallamaError(f"the server at {service.url} was gone after {run.end_s:.1f} s")
    return run


def _meets(service: Service, load: Load, slo: Slo, attainment: float, done: list[Run]) -> bool:
    from oallama.bench.load import summarize

    return all(summary.attainment >= attainment for summary in summarize(_measure(service, load, done), slo))
