"""Sends the requests of a schedule, each at its time, whether or not earlier ones have ended (an open loop)."""

from __future__ import annotations

import asyncio
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import aiohttp

from oallama.errors import OallamaError

from .arrivals import Request, Target, schedule
from .client import SHORTEST_RETRY_S, Answer, session, stream
from .lengths import Lengths
from .service import Service

TICK_S = 0.2
Report = Callable[[float, float, str], None]
End = Literal["planned", "interrupted", "server gone"]


@dataclass(frozen=True)
class Load:
    """What is sent to a server.

    Attributes:
        duration_s: of the measured part, after warmup_s seconds whose requests do not count.
        drain_s: how long answers are waited for after the last request was due; then the client gives up.
        seed: of arrivals and lengths. The words of prompts are others in every run: a server may have kept the last.
        connections: most requests that are under way at once; others wait in the client, and that counts as latency.
        retry: whether a refused request is sent again when the server's Retry-After is over.
    """

    targets: tuple[Target, ...]
    lengths: Lengths
    duration_s: float
    warmup_s: float = 5.0
    drain_s: float = 30.0
    seed: int = 0
    connections: int = 512
    retry: bool = False

    def faster(self, factor: float) -> Load:
        """The same with all rates multiplied."""
        return replace(self, targets=tuple(replace(target, rate=target.rate * factor) for target in self.targets))


@dataclass
class Record:
    """A request and what became of it; times are seconds since the start of the run.

    Attributes:
        sent_s: when it was first sent; None if it never was.
        refusals: the Retry-After of every time that the server was too busy, in seconds, None where it gave none.
    """

    request: Request
    answer: Answer = field(default_factory=Answer)
    sent_s: float | None = None
    refusals: list[float | None] = field(default_factory=list)


@dataclass
class Run:
    """A load and what became of it.

    Attributes:
        end_s: when no more requests were due: the planned time, or an earlier one, see `end`.
        n_capped: requests that waited in the client because `connections` were in use.
        cpu_share: processor time of the generator per second, in cores.
    """

    load: Load
    records: list[Record]
    end: End
    end_s: float
    n_capped: int
    cpu_share: float


def drive(service: Service, load: Load, report: Report | None = None) -> Run:
    """Put the load on the server and wait for the answers.

    Ctrl-C ends it early, and so does the server's end; what came so far is returned.

    Args:
        report: called five times a second with seconds, all of them, and a remark.

    Raises:
        OallamaError: no request falls into the measured time, or a rate or a duration is not above 0.
    """
    requests = schedule(load.targets, load.lengths, load.warmup_s + load.duration_s, load.seed)
    if not any(request.due_s >= load.warmup_s for request in requests):
        raise OallamaError(f"no request comes within {load.duration_s:g} s at these rates; measure longer")
    salt = random.getrandbits(31)
    bodies = [service.body(request, salt) for request in requests]
    return asyncio.run(_Driver(service, load, requests, bodies, report or (lambda done, total, what: None)).run())


class _Driver:
    def __init__(
        self, service: Service, load: Load, requests: list[Request], bodies: list[bytes], report: Report
    ) -> None:
        self._service, self._load, self._bodies, self._report = service, load, bodies, report
        self._records = [Record(request) for request in requests]
        self._running: set[asyncio.Task[None]] = set()
        self._n_sent = self._n_capped = 0
        self._end: End = "planned"

    async def run(self) -> Run:
        self._stop, self._slots = asyncio.Event(), asyncio.Semaphore(self._load.connections)
        total_s = self._load.warmup_s + self._load.duration_s
        began_ns, cpu_s = time.perf_counter_ns(), time.process_time()
        self._clock = lambda: (time.perf_counter_ns() - began_ns) / 1e9
        async with session() as http:
            ticker = asyncio.create_task(self._tick(total_s))
            with _interrupts(self._interrupted):
                for record, body in zip(self._records, self._bodies, strict=True):
                    if await self._stopped_before(record.request.due_s):
                        break
                    task = asyncio.create_task(self._send(http, record, body))
                    self._running.add(task)
                    task.add_done_callback(self._running.discard)
                else:
                    await self._stopped_before(total_s)
                end_s = min(self._clock(), total_s)
                await self._drain(total_s + self._load.drain_s)
            ticker.cancel()
        cpu_share = (time.process_time() - cpu_s) / self._clock()
        return Run(self._load, self._records, self._end, end_s, self._n_capped, cpu_share)

    async def _stopped_before(self, due_s: float) -> bool:
        """Wait until then, or until the run is stopped."""
        if (delay := due_s - self._clock()) > 0:
            try:
                await asyncio.wait_for(self._stop.wait(), delay)
            except asyncio.TimeoutError:
                return False
        return self._stop.is_set()

    async def _drain(self, until_s: float) -> None:
        answers: asyncio.Future[Any] = asyncio.gather(*self._running)
        stop: asyncio.Future[Any] = asyncio.create_task(self._stop.wait())
        await asyncio.wait([answers, stop], timeout=until_s - self._clock(), return_when=asyncio.FIRST_COMPLETED)
        for left in (answers, stop):
            left.cancel()
        await asyncio.gather(answers, stop, return_exceptions=True)

    async def _send(self, http: aiohttp.ClientSession, record: Record, body: bytes) -> None:
        self._n_capped += self._slots.locked()
        again = True
        while again:
            async with self._slots:
                if record.sent_s is None:
                    record.sent_s = self._clock()
                    self._n_sent += 1
                await stream(http, self._service.endpoint, body, record.answer, self._clock)
            if record.answer.gone:
                self._end = "server gone"
                self._stop.set()
            wait_s = record.answer.retry_after_s
            if record.answer.outcome == "refused":
                record.refusals.append(wait_s)
            again = self._load.retry and wait_s is not None
            if again:
                await asyncio.sleep(max(wait_s or 0.0, SHORTEST_RETRY_S))
                record.answer = Answer()

    async def _tick(self, total_s: float) -> None:
        while True:
            now = self._clock()
            what = f"{self._n_sent} sent, {len(self._running)} running"
            self._report(min(now, total_s), total_s, what if now < total_s else f"waiting for {len(self._running)}")
            await asyncio.sleep(TICK_S)

    def _interrupted(self) -> None:
        self._end = "interrupted"
        self._stop.set()


@contextmanager
def _interrupts(then: Callable[[], None]) -> Iterator[None]:
    """Within the block Ctrl-C calls `then`, where that is possible: in the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, then)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)
