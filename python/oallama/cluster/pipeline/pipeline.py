"""Runs a model by a ClusterPlan: servers on the devices, the client's process here, and another plan when one fails."""

from __future__ import annotations

import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from oallama.base.children import forwarded_signals
from oallama.base.json_child import JsonChild
from oallama.errors import OallamaError

from ..allocation.cluster_plan import ClusterPlan
from ..allocation.network import Network
from ..allocation.problem import Problem
from ..allocation.terms import price
from .client import CLIENT, ClientJob
from .link_probe import QUICK
from .member import SILENCE_S, Member
from .replan import Replan, changes, replan
from .watch import Lost, Slower, Watch

PROGRAM = "oallama.cluster.pipeline.client_process"
# By then whoever ended a server's connection has been found.
GRACE_S = SILENCE_S + 1.0
# A new plan is made for so many tokens where nobody knows how many there will be.
HORIZON_TOKENS = 1000


@dataclass(frozen=True)
class Token:
    """A generated token: its text, and when it came, in seconds since the prompt was given."""

    id: int
    piece: bytes
    at: float


@dataclass(frozen=True)
class FreshLinks:
    """The links to a device as they are now."""

    problem: Problem


@dataclass(frozen=True)
class Options:
    """How a pipeline is run.

    Attributes:
        threshold: how many times slower a link may become before there is a new plan.
        cache: whether servers keep weights, which are then not sent again.
        n_threads: of the client, 0: all.
    """

    threshold: float = 1.5
    cache: bool = True
    n_threads: int = 0


class Pipeline:
    """A plan in force on its devices.

    members: agents of the plan's devices. notice: is told, in a line, of every change of plan.

    Attributes:
        plan: as it is now.
        changes_made: one entry per new plan: why, and the layers.
        memory: bytes that each device holds, by kind.
        n_prompt: tokens of the prompt.
    """

    def __init__(
        self, model: Path, plan: ClusterPlan, members: Sequence[Member], options: Options, notice: Callable[[str], None]
    ) -> None:
        # A plan that is changed while it runs is changed for the tokens that are left.
        self.plan = plan.allocated(plan.problem.per_token, plan.layers, plan.bound_s)
        self.changes_made: list[dict[str, Any]] = []
        self.memory: dict[str, dict[str, int]] = {}
        self._model, self._options, self._notice = model, options, notice
        self._members = {member.name: member for member in members}
        self.n_prompt = 0
        self._load_s = 0.0
        self._present: dict[str, set[int]] = {}  # layers whose weights a device has had

    def check_links(self) -> None:
        """Measure the links again; a new plan when one has become slower by more than the threshold, and it pays."""
        before = now = self.plan.problem
        for name in list(self._members):
            try:
                now = self._measured(name, now)
            except OallamaError as error:
                self.lose(Lost(name, str(error)), HORIZON_TOKENS)
                return self.check_links()
        if found := changes(before, now, self._options.threshold):
            other = self._replanned(now, HORIZON_TOKENS)
            if other.moves:
                self._change(now, other, "; ".join(found))

    def start_servers(self) -> list[Member]:
        """Servers on every device that computes a layer; those members, in the order of the layers.

        Where one does not start, the others share its layers.

        Raises:
            OallamaError: when they have too little memory for that.
        """
        while True:
            used = [self._members[entry.name] for entry in self.plan.used]
            waiting = [member for member in used if not member.endpoint]
            if not waiting:
                return used
            try:
                waiting[0].serve(2 * waiting[0].entry.memory_bytes if self._options.cache else 0)
            except OallamaError as error:
                self.lose(Lost(waiting[0].name, str(error)), HORIZON_TOKENS)

    def complete(self, prompt: str, n_generate: int, temperature: float, seed: int | None) -> Iterator[Token]:
        """Tokens one by one. When a device fails, the others go on: from the tokens so far, on a new plan.

        Raises:
            OallamaError: when the remaining devices have too little memory, or the client's process fails.
        """
        begin, made, made_before, state, self.n_prompt = 0.0, 0, 0, None, 0
        tokens: list[int] = []
        with tempfile.TemporaryDirectory(prefix="oallama-") as folder:
            while True:
                job = self._job(
                    prompt=prompt,
                    tokens=tuple(tokens),
                    n_prompt=self.n_prompt,
                    n_generate=n_generate - made,
                    temperature=temperature,
                    seed=seed,
                    state=state,
                )
                run = _Run(self, job, f"{folder}/state-{len(self.changes_made)}")
                for event in run:
                    if isinstance(event, list):
                        tokens = event
                        begin = begin or time.perf_counter()  # TTFT is counted from a loaded model
                        self.n_prompt = self.n_prompt or len(tokens)
                    elif isinstance(event, Token):
                        tokens.append(event.id)
                        made += 1
                        yield replace(event, at=time.perf_counter() - begin)
                state = run.saved
                if run.crashed:
                    if made == made_before:
                        raise OallamaError(run.crashed)
                    made_before = made
                    self._notice(f"{run.crashed}; once more, from the tokens so far")
                if run.done or made >= n_generate:
                    return

    def serve(self, start: Callable[[ClientJob], AbstractContextManager[subprocess.Popen[Any]]]) -> int:
        """Run a server program, which `start` starts and ends, until it ends; anew when a device fails.

        Returns its exit code. SIGINT and SIGTERM are passed on to it.
        """
        while True:
            events: queue.Queue[Any] = queue.Queue()
            for _ in _Run(self, self._job(dry=True), ""):
                pass  # a device that would hold more than it may is an error
            with start(self._job()) as process, self.watch(events), forwarded_signals(process) as asked_to_end:
                threading.Thread(target=lambda p, e: e.put(p.wait()), args=(process, events), daemon=True).start()
                event = events.get()
                if isinstance(event, int):  # ggml aborts when a device is gone, llama-server fails while it loads
                    if event == 0 or asked_to_end:
                        return 0
                    event = self.verdict(events, f"the server ended with exit code {event}")
            self.lose(event, HORIZON_TOKENS)

    def verdict(self, events: queue.Queue[Any], otherwise: str) -> Lost:
        """Which device is gone, shortly after a process has ended. Raises OallamaError when all are well."""
        end = time.monotonic() + GRACE_S
        while (left := end - time.monotonic()) > 0:
            with suppress(queue.Empty):
                event = events.get(timeout=left)
                if isinstance(event, Lost):
                    return event
        for member in self._members.values():
            if why := member.why_gone():
                return Lost(member.name, why)
        raise OallamaError(otherwise)

    def lose(self, event: Lost, n_left: int) -> None:
        """A new plan without the device for `n_left` tokens. Raises OallamaError when there is none."""
        if member := self._members.pop(event.name, None):
            threading.Thread(target=member.close, daemon=True).start()  # it may not answer any more
        problem = self.plan.problem
        left = replace(problem, devices=tuple(d for d in problem.devices if d.name != event.name))
        try:
            self._change(left, self._replanned(left, n_left), event.why)
        except OallamaError as error:
            raise OallamaError(f"{event.why}, and without it {error}") from None

    def measure(self, name: str, events: queue.Queue[Any]) -> None:
        """Measure the links to a device; a thread of its own puts FreshLinks into `events`."""

        def measure() -> None:
            with suppress(OallamaError):  # it is gone: the watch says so
                events.put(FreshLinks(self._measured(name, self.plan.problem)))

        threading.Thread(target=measure, daemon=True).start()

    def is_worth_moving(self, now: Problem, n_left: int) -> bool:
        """Whether a link is slower, and another plan is worth its moves for `n_left` tokens; it is then in force."""
        found = changes(self.plan.problem, now, self._options.threshold)
        if not found or n_left < 1:
            return False
        other = self._replanned(now, n_left)
        gain = (price(now, self.plan.layers).time_s - other.allocation.terms.time_s) * n_left
        if not other.moves or gain < other.move_s + self._load_s:
            self.plan = self.plan.allocated(now, self.plan.layers, 0.0)
            self._notice(f"{'; '.join(found)}; another plan would not be worth its moves")
            return False
        self._change(now, other, "; ".join(found))
        return True

    def loaded(self, seconds: float, memory: dict[str, dict[str, int]]) -> None:
        """The client's process says how long it took to load, and what the devices hold."""
        self._load_s, self.memory = seconds, memory
        if self._options.cache:
            for at, name in enumerate(self.plan.layers):
                self._present.setdefault(name, set()).add(at)

    def watch(self, events: queue.Queue[Any]) -> Watch:
        """Watches the devices that compute a layer."""
        width = self.plan.problem.embedding.output_bytes
        return Watch([self._members[entry.name] for entry in self.plan.used], width, events, self._options.threshold)

    def _job(self, **of_request: Any) -> ClientJob:
        used = self.start_servers()
        names = [member.name for member in used]
        return ClientJob(
            model=str(self._model),
            names=tuple(names),
            endpoints=tuple(member.endpoint for member in used),
            budgets=tuple(member.entry.memory_bytes for member in used),
            layers=tuple(names.index(name) if name in names else CLIENT for name in self.plan.layers),
            context=self.plan.context,
            tiled=tuple(self.plan.tiled.get(name, ()) for name in (*names, self.plan.client.name)),
            n_threads=self._options.n_threads,
            **of_request,
        )

    def _replanned(self, problem: Problem, n_left: int) -> Replan:
        return replan(problem, self.plan.layers, horizon_tokens=max(1, n_left), present=self._present)

    def _change(self, problem: Problem, found: Replan, why: str) -> None:
        self.plan = self.plan.allocated(problem, found.allocation.layers, found.allocation.bound_s)
        where = ", ".join(f"{s.device} {s.first}-{s.end - 1}" for s in found.allocation.ranges)
        self.changes_made.append({"why": why, "layers": self.plan.layers})
        self._notice(f"{why}; {len(found.moves)} layers move: {where}")

    def _measured(self, name: str, problem: Problem) -> Problem:
        """The problem with the links to a device as they are now; a bandwidth from devices.toml stays."""
        client, links = problem.client.name, dict(problem.network.links)
        before, member = links[client, name], self._members[name]
        quality = replace(member.measure_link(before.message_bytes, QUICK), software_s=before.software_s)
        if member.entry.bandwidth is not None:
            quality = replace(quality, bandwidth=before.bandwidth)
        links[client, name] = links[name, client] = quality
        return replace(problem, network=Network(links))


class _Run:
    """One client's process: yields the tokens it begins with, then each Token; ends when it does, or must be replaced.

    done: whether the answer is complete. saved: file with the KV cache, when the process was replaced in good order.
    crashed: why it ended when every device is well; a server's worker may have.
    """

    def __init__(self, pipeline: Pipeline, job: ClientJob, state: str) -> None:
        self.done, self.saved, self.crashed = False, None, ""
        self._pipeline, self._job, self._state = pipeline, job, state
        self._events: queue.Queue[Any] = queue.Queue()

    def __iter__(self) -> Iterator[list[int] | Token]:
        pipeline, job = self._pipeline, self._job
        with ExitStack() as stack:
            child = stack.enter_context(JsonChild([sys.executable, "-m", PROGRAM], events=self._events))
            watch = stack.enter_context(pipeline.watch(self._events))
            n_left, leaving = job.n_generate, False
            child.tell(asdict(job))
            while True:
                event = self._next(child)
                if self.crashed:
                    return
                if isinstance(event, Lost):
                    pipeline.lose(event, n_left)
                    return
                if isinstance(event, Slower):
                    pipeline.measure(event.name, self._events)
                elif isinstance(event, FreshLinks):
                    if not leaving and pipeline.is_worth_moving(event.problem, n_left):
                        leaving = True
                        child.tell({"save": self._state})
                elif "loaded" in event:
                    pipeline.loaded(event["loaded"], event["memory"])
                    watch.begin()
                    yield event["tokens"]
                    if job.dry:
                        return
                elif "token" in event:
                    n_left -= 1
                    yield Token(event["token"], bytes.fromhex(event["piece"]), event["at"])
                elif "saved" in event:
                    self.saved = event["saved"]
                    return
                elif "error" in event:
                    raise OallamaError(event["error"])
                elif "lost" in event:  # a server does not answer, or loading failed
                    pipeline.lose(pipeline.verdict(self._events, event["lost"]), n_left)
                    return
                else:
                    self.done = True
                    return

    def _next(self, child: JsonChild) -> Any:
        """The next event; when the process has ended without a word, what the watch says of it."""
        event = self._events.get()
        if event is not None:
            return event
        otherwise = f"the client's process ended: {child.last_words()}"
        try:
            return self._pipeline.verdict(self._events, otherwise)
        except OallamaError as error:
            self.crashed = str(error)
            return None


__all__ = ["Options", "Pipeline", "Token"]
