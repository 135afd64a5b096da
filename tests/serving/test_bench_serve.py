"""`oallama bench serve`: lengths, arrivals, arithmetic on a clock that only the test moves, servers of every mood."""

from __future__ import annotations

import asyncio
import itertools
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from typer.testing import CliRunner, Result

from oallama.base.ports import free_port
from oallama.bench.load import (
    TRACES,
    Load,
    Record,
    Request,
    Run,
    Slo,
    Target,
    drive,
    highest,
    lags,
    lines,
    parse_lengths,
    percentiles,
    reach,
    schedule,
    summarize,
    write_plot,
)
from oallama.bench.load.arrivals import poisson
from oallama.bench.load.client import Answer, Events, session, stream
from oallama.bench.load.lengths import LONGEST
from oallama.bench.load.measure import e2e, itl, tpot, ttft
from oallama.bench.load.prompts import Prompts, of_words
from oallama.cli.app import app
from oallama.errors import OallamaError
from support.processes import process_of, until
from support.servers import OALLAMA, is_open

SHORT = parse_lengths("4:3")
PROBE = 2  # tokens that the generator asks for before the load; no load here does
PAPER = {"burstgpt": (575, 340), "azure-conv": (749, 232)}  # docs/sources.md, 4


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


# ---- lengths and arrivals --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TRACES)
def test_sampled_means_are_the_papers(name: str) -> None:
    drawn = parse_lengths(name).draw(rng(), 200_000)
    for found, wanted in zip(drawn.T, PAPER[name], strict=True):
        assert abs(found.mean() - wanted) < 5 * found.std() / len(found) ** 0.5 + 0.5
    assert drawn.min() >= 1 and drawn.sum(axis=1).max() <= LONGEST + 1  # both lengths may be rounded up
    assert stats.skew(drawn[:, 1]) > 1  # most answers are short, a few are long
    tenth = parse_lengths(name, 0.1).draw(rng(), 50_000)
    assert tenth.mean(axis=0) == pytest.approx(np.array(PAPER[name]) / 10, rel=0.02)


@settings(max_examples=50)
@given(st.sampled_from(sorted(TRACES)), st.floats(0.001, 10), st.integers(0, 2**32), st.integers(0, 40))
def test_lengths_are_whole_tokens_and_do_not_depend_on_their_number(name: str, scale: float, seed: int, n: int) -> None:
    lengths = parse_lengths(name, scale)
    drawn = lengths.draw(rng(seed), n)
    assert drawn.shape == (n, 2) and drawn.dtype == int and (drawn >= 1).all()
    assert (lengths.draw(rng(seed), n + 7)[:n] == drawn).all()


def test_fixed_lengths_and_files_of_pairs(tmp_path: Path) -> None:
    assert parse_lengths("128:64").draw(rng(), 2).tolist() == [[128, 64]] * 2
    assert parse_lengths("128:64", 0.1).draw(rng(), 1).tolist() == [[13, 6]]
    files = {
        "azure.csv": "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n",
        "burst.csv": "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        "5,ChatGPT,374,44,418,Conversation log\n1106,ChatGPT,0,0,0,Conversation log\n",
        "bare.csv": "374,44\n",
        "named.jsonl": '{"timestamp": 1, "input_length": 374, "output_length": 44}\n\n',
        "bare.jsonl": "[374, 44]\n",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
        assert (parse_lengths(str(tmp_path / name)).draw(rng(), 5) == [374, 44]).all(), name
    (tmp_path / "two.csv").write_text("1,2\n3,4\n")
    drawn = parse_lengths(str(tmp_path / "two.csv")).draw(rng(), 100)
    assert {tuple(pair) for pair in drawn.tolist()} == {(1, 2), (3, 4)}


@pytest.mark.parametrize(
    "text", ["", "a,b\n1,2\n", "1\n", "1,x\n", "prompt,answer\n0,0\n", '{"prompt": 1}\n', "[1]\n", "{\n", "\x00\xff"]
)
def test_files_without_pairs_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "bad"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(OallamaError, match=r"no pairs of lengths in .*bad|cannot read lengths from .*bad"):
        parse_lengths(str(path))


@pytest.mark.parametrize("text, scale", [("burst", 1.0), ("0:5", 1.0), ("5", 1.0), ("5:5", 0.0), ("5:5", float("nan"))])
def test_lengths_that_are_none(text: str, scale: float) -> None:
    with pytest.raises(OallamaError, match=r"unknown lengths|one token at least|above 0"):
        parse_lengths(text, scale)


def test_arrivals_are_a_poisson_process() -> None:
    times = poisson(50.0, 400.0, rng())
    assert abs(len(times) - 20_000) < 5 * 20_000**0.5
    assert stats.kstest(np.diff(times), "expon", args=(0, 1 / 50)).pvalue > 1e-4
    assert stats.kstest(times, "uniform", args=(0, 400)).pvalue > 1e-4


@settings(max_examples=50)
@given(st.floats(0.01, 100), st.floats(0.1, 20), st.integers(0, 2**32))
def test_arrivals_scale_with_their_rate(rate: float, duration_s: float, seed: int) -> None:
    times = poisson(rate, duration_s, rng(seed))
    assert (np.diff(times) >= 0).all() and all(0 <= time_s < duration_s for time_s in times)
    slower = poisson(rate / 2, duration_s * 2, rng(seed))
    assert slower == pytest.approx(2 * times)


def test_a_schedule_is_the_same_whatever_else_is_in_it() -> None:
    lengths = parse_lengths("burstgpt", 0.1)
    alone = schedule([Target("big", 2.0)], lengths, 50.0, seed=3)
    both = schedule([Target("big", 2.0), Target("small", 1.0)], lengths, 50.0, seed=3)
    twice = schedule([Target("big", 4.0)], lengths, 25.0, seed=3)

    def of_big(requests: list[Request]) -> list[tuple[int, int]]:
        return [(request.n_prompt, request.n_answer) for request in requests if request.model == "big"]

    assert of_big(alone) == of_big(both) == of_big(twice) and len(both) > len(alone) > 50
    assert [request.number for request in both] == list(range(len(both)))
    assert [request.due_s for request in both] == sorted(request.due_s for request in both)
    assert schedule([Target("big", 2.0)], lengths, 50.0, seed=4) != alone


@pytest.mark.parametrize(
    "targets, duration_s",
    [
        ([Target("a", 0.0)], 1.0),
        ([Target("a", -1.0)], 1.0),
        ([Target("a", float("nan"))], 1.0),
        ([Target("a", float("inf"))], 1.0),
        ([Target("a", 1e6)], 1.0),
        ([Target("a", 1.0)], 0.0),
        ([Target("a", 1.0), Target("a", 2.0)], 1.0),
    ],
)
def test_schedules_that_are_none(targets: list[Target], duration_s: float) -> None:
    with pytest.raises(OallamaError, match=r"above 0|given twice"):
        schedule(targets, SHORT, duration_s, seed=0)


@pytest.mark.parametrize("prompts", [Prompts(tuple(range(300, 340))), of_words()], ids=["tokens", "words"])
def test_no_prompt_begins_like_another(prompts: Prompts) -> None:
    made = [prompts.make(Request(number, "m", 0.0, 30, 1), salt=5) for number in range(40)]
    split = [prompt.split() if isinstance(prompt, str) else prompt for prompt in made]
    assert len({str(prompt[0]) for prompt in split}) == len(split)
    n = 30 if isinstance(made[0], list) else 22  # words of 4/3 tokens each
    assert all(len(prompt) == n for prompt in split)
    assert prompts.make(Request(0, "m", 0.0, 30, 1), salt=5) == made[0] != prompts.make(Request(0, "m", 0, 30, 1), 6)
    assert len(prompts.make(Request(0, "m", 0.0, 1, 1), salt=5)) > 0


# ---- arithmetic ------------------------------------------------------------------------------------------------------


class Clock:
    """Seconds that pass only when the test says so; counts how often it was read."""

    def __init__(self) -> None:
        self.now_s, self.n_reads = 0.0, 0

    def __call__(self) -> float:
        self.n_reads += 1
        return self.now_s


def text(text: str = "x", **more: Any) -> dict[str, Any]:
    return {"choices": [{"text": text, "index": 0, "finish_reason": None}], **more}


def stop(**more: Any) -> dict[str, Any]:
    return {"choices": [{"text": "", "index": 0, "finish_reason": "length"}], **more}


def usage(n_prompt: int, n_answer: int) -> dict[str, Any]:
    return {"usage": {"prompt_tokens": n_prompt, "completion_tokens": n_answer}}


def played(script: Sequence[tuple[float, dict[str, Any]]]) -> Answer:
    """What the client makes of a stream whose events come after delays on the test's clock, over a real connection."""

    async def play() -> Answer:
        clock, answer = Clock(), Answer()

        async def reply(request: web.Request) -> web.StreamResponse:
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await response.prepare(request)
            for delay_s, event in script:
                seen, clock.now_s = clock.n_reads, clock.now_s + delay_s
                await response.write(f"data: {json.dumps(event)}\n\n".encode())
                while clock.n_reads == seen:  # the client has not stamped it yet
                    await asyncio.sleep(0.001)
            await response.write(b"data: [DONE]\n\n")
            return response

        async with served(reply) as url, session() as http:
            await asyncio.wait_for(stream(http, url, b"{}", answer, clock), 30)
        return answer

    return asyncio.run(play())


class served:
    """A handler of every path in this event loop; a context manager that gives the address."""

    def __init__(self, reply: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> None:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", reply)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)

    async def __aenter__(self) -> str:
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", port := free_port())
        await site.start()
        return f"http://127.0.0.1:{port}"

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()


def test_latencies_of_a_stream_are_the_delays_of_its_server() -> None:
    answer = played([(0.5, text()), (0.1, text()), (0.2, text()), (0.1, text()), (0.0, stop(**usage(7, 4)))])
    record = Record(Request(0, "m", 0.1, 7, 4), answer, sent_s=0.1)
    assert (answer.outcome, answer.n_prompt, answer.n_answer) == ("completed", 7, 4)
    assert ttft(record) == pytest.approx(0.4) and e2e(record) == pytest.approx(0.8)  # from when it was due
    assert itl(record) == pytest.approx([0.1, 0.2, 0.1]) and tpot(record) == pytest.approx(0.4 / 3)


def test_tokens_are_counted_by_the_server_not_by_chunks() -> None:
    """A character of three tokens comes in one chunk, and the last token's text may never come."""
    chunked = played([(1.0, text("a")), (3.0, text("é")), (1.0, stop()), (0.0, {"choices": [], **usage(5, 6)})])
    assert tpot(Record(Request(0, "m", 0.0, 5, 6), chunked)) == pytest.approx(4.0 / 5)
    timings = {"timings": {"prompt_n": 2, "cache_n": 3, "predicted_n": 6}}
    by_timings = played([(1.0, text("a")), (4.0, stop(**timings))])
    assert (by_timings.n_prompt, by_timings.n_cached, by_timings.n_answer) == (5, 3, 6)
    untold = played([(1.0, text()), (1.0, text()), (2.0, stop())])
    assert untold.n_answer is None and tpot(Record(Request(0, "m", 0.0, 5, 6), untold)) == pytest.approx(3.0)
    silent = played([(2.0, stop(**usage(5, 1)))])
    record = Record(Request(0, "m", 0.0, 5, 1), silent)
    assert silent.outcome == "completed" and (ttft(record), tpot(record), itl(record)) == (2.0, None, [])


def test_chat_deltas_are_text_and_roles_are_none() -> None:
    def delta(**fields: Any) -> dict[str, Any]:
        return {"choices": [{"delta": fields, "finish_reason": None}]}

    end = {"choices": [{"delta": {}, "finish_reason": "stop"}]}
    said = [delta(role="assistant", content=None), delta(reasoning_content="hm"), delta(content="x"), end]
    answer = played([(1.0, event) for event in said])
    assert answer.text_s == [2.0, 3.0] and answer.end_s == 4.0


@settings(max_examples=50)
@given(st.lists(st.dictionaries(st.text(max_size=3), st.text(max_size=9), max_size=2), max_size=6), st.data())
def test_events_are_whole_however_they_are_cut(events: list[dict[str, str]], data: st.DataObject) -> None:
    ends = data.draw(st.sampled_from(["\n\n", "\r\n\r\n"]))
    sent = "".join(f": a comment\nevent: x\ndata: {json.dumps(event)}{ends}" for event in events).encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(sent)), max_size=9)))
    reader = Events()
    parts = [sent[a:b] for a, b in itertools.pairwise([0, *cuts, len(sent)])]
    assert [json.loads(event) for part in parts for event in reader.feed(part)] == events


def answered(due_s: float, times: Sequence[float], n_prompt: int = 10, model: str = "m", warm: bool = False) -> Record:
    answer = Answer("completed", text_s=list(times), end_s=times[-1], n_prompt=n_prompt, n_answer=len(times))
    return Record(Request(0, model, due_s, n_prompt, len(times)), answer, sent_s=due_s)


def run_of(records: list[Record], rate: float = 1.0) -> Run:
    load = Load((Target("m", rate),), SHORT, duration_s=10.0, warmup_s=5.0)
    return Run(load, records, "planned", 15.0, 0, 0.0)


def test_a_run_adds_up() -> None:
    before = answered(4.0, [4.5, 6.5])  # due in the warm-up: its second token counts as throughput, and its end
    fast, slow = answered(6.0, [6.5, 7.0, 7.5]), answered(7.0, [9.0, 9.2, 9.4, 9.6])
    late = answered(14.0, [14.5, 16.0])  # its second token and its end are too late for the throughput
    failed = Record(Request(1, "m", 8.0, 9, 9), Answer("failed", "500: no"), 8.0)
    refused = Record(Request(2, "m", 8.5, 9, 9), Answer("refused", "503: full", retry_after_s=2.0), 8.5, [2.0, 2.0])
    unfinished = Record(Request(3, "m", 9.0, 9, 9), Answer(text_s=[14.0, 14.9, 15.1]), 9.0)
    (of,) = summarize(run_of([before, fast, slow, late, failed, refused, unfinished]), Slo(1.0, 1.0))
    assert (of.sent, of.completed, of.refused, of.failed, of.unfinished) == (6, 3, 1, 1, 1)
    assert (of.retry_after, of.n_retries, of.errors) == (1, 1, {"500: no": 1, "503: full": 1})
    assert of.ttft_s is not None and of.tpot_s is not None and of.itl_s is not None and of.e2e_s is not None
    assert (of.ttft_s.n, of.ttft_s.mean, of.ttft_s.p50) == (3, pytest.approx(1.0), 0.5)
    assert of.tpot_s.mean == pytest.approx((0.5 + 0.2 + 1.5) / 3) and of.itl_s.n == 6
    assert of.e2e_s.p99 == pytest.approx(2.0 + 0.98 * 0.6)
    assert of.requests_per_s == pytest.approx(3 / 10)  # before, fast, slow
    assert of.tokens_out_per_s == pytest.approx((1 + 3 + 4 + 1 + 2) / 10)
    assert of.tokens_in_per_s == pytest.approx((10 + 10 + 10 + 9) / 10)
    assert of.attainment == pytest.approx(1 / 6)  # fast; slow's TTFT is 2 s, late's TPOT 1.5 s
    assert (of.good_requests_per_s, of.good_tokens_per_s) == (pytest.approx(1 / 10), pytest.approx(3 / 10))
    assert summarize(run_of([before]), Slo()) == [] and lags(run_of([])) is None
    (anything,) = summarize(run_of([fast, slow, late, failed]), Slo())
    assert anything.attainment == 3 / 4


@settings(max_examples=50)
@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=50))
def test_percentiles_are_numpys(values: list[float]) -> None:
    found = percentiles(values)
    assert found is not None and found.n == len(values) and found.mean == pytest.approx(np.mean(values))
    assert [found.p50, found.p90, found.p95, found.p99] == pytest.approx(np.percentile(values, [50, 90, 95, 99]))
    assert percentiles([]) is None


@settings(max_examples=50)
@given(st.floats(0.02, 50), st.integers(8, 14))
def test_the_search_brackets_the_highest_rate(limit: float, n_runs: int) -> None:
    tried: list[float] = []

    def meets(factor: float) -> bool:
        tried.append(factor)
        return factor <= limit

    good, bad = highest(meets, n_runs)
    assert good is not None and bad is not None and good <= limit < bad
    assert len(tried) <= n_runs and (bad / good <= 1.05 or len(tried) == n_runs)
    assert bad / good <= 2 and set(tried) >= {good, bad}


def test_a_search_without_an_end() -> None:
    assert highest(lambda factor: True, 3) == (4.0, None) and highest(lambda factor: False, 3) == (None, 0.25)


def test_lines_and_plot_of_a_run(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    run = run_of([answered(6.0, [6.5, 7.0, 7.5]), Record(Request(1, "m", 14.0, 9, 9))])
    found = [json.loads(json.dumps(line)) for line in lines(run, Slo(1.0), number=2)]
    assert [line["run"] for line in found] == [2, 2]
    assert found[0]["ttft_s"] == 0.5 and found[0]["tokens"] == [10, 3] and found[1]["models"][0]["attainment"] == 0.5
    assert write_plot(run, tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(OallamaError, match="nothing to plot"):
        write_plot(run_of([]), tmp_path / "p.png")
    with pytest.raises(OallamaError, match="cannot write"):
        write_plot(run, tmp_path / "p.png" / "below-a-file.png")


# ---- servers of every mood -------------------------------------------------------------------------------------------

Reply = Callable[[web.Request, dict[str, Any]], Awaitable[web.StreamResponse]]


class Fake:
    """An OpenAI server with two models in a thread of its own; `reply` answers what is not the generator's first probe.

    bodies: what it was asked for.
    """

    def __init__(
        self, reply: Reply, models: Sequence[str] = ("big", "small"), tokens: Sequence[int] = range(50)
    ) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.url = f"http://127.0.0.1:{free_port()}"
        self._reply, self._models, self._tokens, self._up = reply, models, tokens, threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)

    def __enter__(self) -> Fake:
        self._thread.start()
        assert self._up.wait(30)
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(RuntimeError):  # its loop is closed: the server has ended by itself
            self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join(30)

    async def _serve(self) -> None:
        self._loop, self._over = asyncio.get_running_loop(), asyncio.Event()
        app = web.Application()
        app.router.add_get("/v1/models", self._list)
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_post("/v1/{path:.*}", self._complete)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", int(self.url.rpartition(":")[2])).start()
        self._up.set()
        await self._over.wait()
        await runner.cleanup()

    async def _list(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": name} for name in self._models]})

    async def _tokenize(self, _: web.Request) -> web.Response:
        return web.json_response({"tokens": [*self._tokens]}) if self._tokens else web.Response(status=404)

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if body["max_tokens"] == PROBE:
            return await whole(request, body)
        self.bodies.append(body)
        if self._reply is dies:
            self._over.set()
        return await self._reply(request, body)


async def begun(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    return response


async def write(response: web.StreamResponse, *events: dict[str, Any]) -> None:
    for event in events:
        await response.write(f"data: {json.dumps(event)}\n\n".encode())


async def whole(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """As many tokens as were asked for, at once."""
    response = await begun(request)
    n = body["max_tokens"]
    prompt = body.get("prompt") or body["messages"][0]["content"]
    n_prompt = len(prompt.split() if isinstance(prompt, str) else prompt)
    await write(response, *[text()] * n, stop(), {"choices": [], **usage(n_prompt, n)})
    await response.write(b"data: [DONE]\n\n")
    return response


def says(
    *events: dict[str, Any], raw: bytes = b"", then: Callable[[web.Request], Awaitable[None]] | None = None
) -> Reply:
    """An answer that is not whole."""

    async def reply(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = await begun(request)
        await write(response, *events)
        await response.write(raw)
        if then is not None:
            await then(request)
        return response

    return reply


async def silence(request: web.Request) -> None:
    await asyncio.sleep(60)


async def cut_off(request: web.Request) -> None:
    assert request.transport is not None
    request.transport.abort()


def refuses(status: int, text: str, **headers: str) -> Reply:
    async def reply(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return web.Response(status=status, text=text, headers=headers)

    return reply


def error(message: str, **more: int) -> dict[str, Any]:
    return {"error": {"message": message, **more}}


never, dies = says(text(), then=silence), says(text(), then=silence)
full = refuses(503, json.dumps(error("queue full")))
at_once = refuses(503, json.dumps(error("queue full")), **{"Retry-After": "0"})
too_long = refuses(400, json.dumps(error("exceeds the context", code=400)))
plain_error = refuses(502, "bad\ngateway")


def a_load(rate: float = 40.0, duration_s: float = 0.5, **more: Any) -> Load:
    return Load(
        (Target("big", rate),), more.pop("lengths", SHORT), duration_s, **{"warmup_s": 0.1, "drain_s": 30.0} | more
    )


def driven(fake: Fake, load: Load, **more: Any) -> Run:
    return drive(reach(fake.url, ["big"], **more), load)


def test_requests_are_what_was_asked_for() -> None:
    with Fake(whole) as fake:
        lengths = parse_lengths("azure-conv", 0.1)
        run = driven(fake, a_load(lengths=lengths))
        (of,) = summarize(run, Slo())
    assert of.completed == of.sent > 5 and of.short == 0 and of.n_prompt == of.asked_prompt
    for record, body in zip(run.records, fake.bodies, strict=True):
        assert len(body["prompt"]) == record.request.n_prompt and body["max_tokens"] == record.request.n_answer
        assert record.answer.n_answer == record.request.n_answer
        assert body["stream"] and body["ignore_eos"] and body["stream_options"] == {"include_usage": True}
    assert len({body["prompt"][0] for body in fake.bodies}) == len(fake.bodies)
    late = lags(run)
    assert late is not None and late.n == len(run.records) and run.end == "planned" and run.n_capped == 0


def test_chats_and_servers_without_a_tokenizer_get_words() -> None:
    with Fake(whole, tokens=()) as fake:
        service = reach(fake.url + "/v1/", ["big"])
        assert not service.exact and service.url == fake.url
        drive(service, a_load(lengths=parse_lengths("40:3")))
        assert all(len(body["prompt"].split()) == 30 for body in fake.bodies)
    with Fake(whole) as fake:
        assert reach(fake.url, ["big"]).exact
        run = driven(fake, a_load(), chat=True)
        assert summarize(run, Slo())[0].completed and all("messages" in body for body in fake.bodies)


def test_requests_do_not_wait_for_each_other() -> None:
    """No answer ends before all requests have come: a client that waits for one would never send the last."""
    load = a_load()
    n = len(schedule(load.targets, load.lengths, load.warmup_s + load.duration_s, load.seed))
    came: list[int] = []

    async def together(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        came.append(1)
        while len(came) < n:
            await asyncio.sleep(0.01)
        return await whole(request, body)

    with Fake(together) as fake:
        run = driven(fake, load)
    assert n > 10 and [record.answer.outcome for record in run.records] == ["completed"] * n


def test_requests_wait_for_connections_and_that_is_told() -> None:
    at_once: list[int] = []

    async def one_by_one(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        at_once.append(1)
        most = len(at_once)
        await asyncio.sleep(0.05)
        at_once.pop()
        assert most <= 2
        return await whole(request, body)

    with Fake(one_by_one) as fake:
        run = driven(fake, a_load(rate=60.0, connections=2))
    assert run.n_capped > 0 and summarize(run, Slo())[0].completed == summarize(run, Slo())[0].sent


def test_refusals_are_counted_and_obeyed() -> None:
    refused = set[tuple[int, ...]]()

    async def at_first(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if (key := tuple(body["prompt"])) not in refused:
            refused.add(key)
            return await at_once(request, body)
        return await whole(request, body)

    with Fake(at_first) as fake:
        (obeyed,) = summarize(driven(fake, a_load(retry=True)), Slo())
        (left,) = summarize(driven(fake, a_load()), Slo())
    assert obeyed.completed == obeyed.sent == obeyed.retry_after == obeyed.n_retries and obeyed.refused == 0
    assert left.refused == left.sent == left.retry_after and left.n_retries == 0
    assert left.errors == {"503: queue full": left.sent}
    with Fake(full) as fake:
        (told,) = summarize(driven(fake, a_load(retry=True)), Slo())
    assert told.refused == told.sent and told.retry_after == told.n_retries == 0 and told.attainment == 0


@pytest.mark.parametrize(
    "reply, error",
    [
        (says(text(), then=cut_off), ""),
        (says(text()), "the answer ended before its end"),
        (says(), "no answer came"),
        (says(raw=b"data: what?\n\n"), "the server sent what is no event: what?"),
        (says(text(), error("out of KV cache", code=500)), "out of KV cache"),
        (too_long, "400: exceeds the context"),
        (plain_error, "502: bad gateway"),
    ],
)
def test_failures_are_told_apart(reply: Reply, error: str) -> None:
    with Fake(reply) as fake:
        run = driven(fake, a_load(rate=20.0))
        (of,) = summarize(run, Slo())
    assert of.failed == of.sent > 0 and of.completed == 0 and of.ttft_s is None and run.end == "planned"
    (said,) = of.errors
    assert error in said and said


def test_answers_that_do_not_end_are_given_up() -> None:
    with Fake(never) as fake:
        run = driven(fake, a_load(drain_s=0.1))
        (of,) = summarize(run, Slo())
    assert of.unfinished == of.sent > 0 and of.completed == 0


def test_a_server_that_ends_ends_the_run() -> None:
    with Fake(dies) as fake:
        began = time.monotonic()
        run = driven(fake, a_load(rate=5.0, duration_s=500.0))
    assert run.end == "server gone" and run.end_s < 400 and time.monotonic() - began < 400
    assert all(record.answer.outcome in ("failed", "unfinished") for record in run.records)


def test_extras_that_a_server_refuses_are_left_out() -> None:
    extras = ("ignore_eos", "stream_options")

    class Strict(Fake):
        async def _complete(self, request: web.Request) -> web.StreamResponse:
            if unknown := [name for name in extras if name in await request.json()]:
                return web.json_response({"error": {"message": f"unknown fields {unknown}"}}, status=400)
            return await super()._complete(request)

    with Strict(whole) as fake:
        run = driven(fake, a_load())
    assert summarize(run, Slo())[0].completed and not any(name in body for body in fake.bodies for name in extras)


def test_a_server_is_waited_for_while_it_loads() -> None:
    class Loading(Fake):
        n = 0

        async def _complete(self, request: web.Request) -> web.StreamResponse:
            self.n += 1
            return await (at_once(request, {}) if self.n < 3 else super()._complete(request))

    waited: list[str] = []
    with Loading(whole) as fake:
        reach(fake.url, ["big"], waiting=waited.append)
    assert waited == ["big", "big"]


def test_what_cannot_be_reached_says_why() -> None:
    with Fake(whole) as fake, pytest.raises(OallamaError, match="has big, small; name the model with --model"):
        reach(fake.url, None)
    with Fake(whole, models=["one"]) as fake:
        assert list(reach(fake.url, None).prompts) == ["one"]
        with pytest.raises(OallamaError, match="has no model 'two'; it has one"):
            reach(fake.url, ["two"])
    with Fake(whole, models=[]) as fake:
        assert list(reach(fake.url, ["any"]).prompts) == ["any"]  # a server that lists nothing may have it
        with pytest.raises(OallamaError, match="does not say what it has"):
            reach(fake.url, None)
    for url in (f"http://127.0.0.1:{free_port()}", "127.0.0.1:1", "what", "http://"):
        with pytest.raises(OallamaError, match="no server answers at"):
            reach(url, None)

    class Broken(Fake):
        async def _complete(self, request: web.Request) -> web.StreamResponse:
            return await plain_error(request, {})

    with (
        Broken(whole) as fake,
        pytest.raises(OallamaError, match=r"the model big does not answer at .* 502: bad gateway"),
    ):
        reach(fake.url, ["big"])
    with Fake(whole) as fake, pytest.raises(OallamaError, match="no request comes within"):
        driven(fake, a_load(rate=1e-6))


# ---- the command -----------------------------------------------------------------------------------------------------


def oallama(*arguments: str | Path) -> Result:
    """`oallama bench serve` in this process."""
    return CliRunner().invoke(app, ["bench", "serve", *map(str, arguments)])


QUICK = ("--lengths", "4:3", "--duration", "0.5", "--warmup", "0.1")


def test_the_command_shows_and_writes_what_it_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "out.jsonl"
    monkeypatch.setattr(sys, "argv", ["oallama", "bench", "serve"])
    with Fake(whole) as fake:
        models = ("--model", "big=20", "--model", "small=8")
        result = oallama("--url", fake.url, *models, *QUICK, "--slo-ttft", "60", "-o", path)
        shown = oallama("--url", fake.url, "--model", "big=20", *QUICK, "--json")
    assert result.exit_code == 0, result.stderr
    assert max(map(len, result.stdout.splitlines()[:-1])) <= 80
    assert all(word in result.stdout for word in ("big", "small", "TTFT", "TPOT", "ITL", "E2E", "p95", "within TTFT"))
    head, *requests, summary = [json.loads(line) for line in path.read_text().splitlines()]
    assert head["load"]["targets"] == {"big": 20.0, "small": 8.0} and head["hardware"]["cpus"]
    assert head["argv"] == ["oallama", "bench", "serve"]
    assert head["slo"] == {"ttft_s": 60.0, "tpot_s": None} and head["load"]["lengths"] == {"name": "4:3", "scale": 1.0}
    assert {line["model"] for line in requests} == {"big", "small"}
    assert [of["model"] for of in summary["models"]] == ["big", "small"] and summary["models"][0]["attainment"] == 1
    (only,) = json.loads(shown.stdout)
    assert only["models"][0]["completed"] > 0 and only["end"] == "planned"


def test_the_command_searches(tmp_path: Path) -> None:
    with Fake(whole) as fake:
        options = ("--search-rate", "--slo-ttft", "60", "--runs", "2", *QUICK)
        result = oallama("--url", fake.url, "--model", "big=20", *options, "-o", tmp_path / "s")
    assert result.exit_code == 0, result.stderr
    assert "met by 90% up to big 40/s; no higher one was tried" in result.stdout
    runs = [line for line in map(json.loads, (tmp_path / "s").read_text().splitlines()) if "models" in line]
    assert [run["rates"] for run in runs] == [{"big": 20.0}, {"big": 40.0}]


def test_ctrl_c_shows_what_there_is(tmp_path: Path) -> None:
    begun_s = threading.Event()

    async def slow(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = await whole(request, body)
        begun_s.set()
        return response

    command = [OALLAMA, "bench", "serve", "--model", "big=50", "--lengths", "4:3", "--duration", "500", "--warmup", "0"]
    with (
        Fake(slow) as fake,
        process_of([*command, "--url", fake.url], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process,
    ):
        assert begun_s.wait(60)
        until(lambda: len(fake.bodies) > 5)
        process.send_signal(signal.SIGINT)
        shown, said = process.communicate(timeout=60)
    assert process.returncode == 130 and "interrupted" in said and "Traceback" not in said, said
    assert "completed" in shown and "TTFT" in shown


def test_a_server_that_ends_is_an_error_after_the_tables() -> None:
    with Fake(dies) as fake:
        options = ("--model", "big=10", "--lengths", "4:3", "--duration", "500", "--warmup", "0")
        result = oallama("--url", fake.url, *options)
    assert result.exit_code == 2 and "requests" in result.stdout
    assert f"error: the server at {fake.url} was gone after" in result.stderr


def test_what_the_command_refuses(tmp_path: Path) -> None:
    with Fake(too_long) as fake:
        for arguments, reason in (
            (["--model", "big"], "--model is NAME=RATE"),
            (["--model", "=2"], "has no model ''"),
            (["--model", "big=0"], "rates and durations are above 0"),
            (["--model", "big=1", "--rate", "2"], "--rate takes the place of --model"),
            (["--search-rate"], "--search-rate needs an objective"),
            (["--lengths", "none"], "unknown lengths 'none'"),
            (["--model", "big=20", *QUICK, "-o", tmp_path / "no" / "o"], "cannot write"),
            (["--model", "big=20", *QUICK], "no request was completed"),
        ):
            result = oallama("--url", fake.url, *arguments)
            assert result.exit_code == 2 and reason in result.stderr, (arguments, result.stderr)


def test_bench_of_a_model_is_what_it_was() -> None:
    result = CliRunner().invoke(app, ["bench", "nothing.gguf", "--no-baseline"])
    assert result.exit_code == 2 and "nothing.gguf" in result.stderr
    assert "Usage: oallama bench [OPTIONS]" in CliRunner().invoke(app, ["bench", "--help"], prog_name="oallama").stdout


# ---- the real thing --------------------------------------------------------------------------------------------------


def test_a_woven_server_under_load(tiny: Callable[..., Path], tmp_path: Path) -> None:
    hot, cold, port = tiny("llama", "F16"), tiny("qwen2", "F16"), free_port()
    url, path = f"http://127.0.0.1:{port}", tmp_path / "out.jsonl"
    arguments = ["--hot", hot, "--cold", cold, "--no-plan", "--parallel", "2", "--ctx", "2048", "--threads", "1"]
    arguments += ["--port", port]
    with process_of([OALLAMA, "serve", *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as server:
        until(lambda: is_open(port))
        models = ("--model", f"{hot.stem}=6", "--model", f"{cold.stem}=2")
        options = ("--lengths", "burstgpt", "--scale", "0.02", "--duration", "2.5", "--warmup", "0.5")
        result = oallama("--url", url, *models, *options, "-o", path)
        server.send_signal(signal.SIGTERM)
        server.communicate(timeout=60)
    assert result.exit_code == 0, result.stderr
    head, *requests, summary = [json.loads(line) for line in path.read_text().splitlines()]
    assert head["service"]["exact_prompts"] and summary["end"] == "planned"
    for of in summary["models"]:
        assert of["completed"] == of["sent"] > 0 and of["failed"] == of["short"] == 0 and of["cached"] == 0
        assert of["n_prompt"] == of["asked_prompt"] and of["n_answer"] == of["asked_answer"]
        assert 0 < of["ttft_s"]["p50"] <= of["e2e_s"]["p99"]
    assert all(line["tokens"] == [line["n_prompt"], line["n_answer"]] for line in requests)
