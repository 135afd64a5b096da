"""Many requests to `oallama serve --hot --cold` while models are killed and stopped, by the official openai package.

pip install openai; python bench/serve_stress.py [--requests 5000] [--clients 12] [--every 3] [--out FILE.jsonl]

Two tiny models, guests between them. A request is a completion or a chat, streamed or whole, of either model. Some
clients hang up in the middle, some requests are wrong. Every few seconds a model's process is killed, stopped for a
while, or unloaded by request. An answer must have all the tokens that were asked for, or end in an exception of the
package. Faults are: fewer tokens without an exception, an exception that is none of the package's, and an answer that
takes longer than --patience. Texts are compared with those of quiet requests, and other ones are counted: sums of
another batch may turn a near tie. Then the server is told to end, and what it leaves is counted: processes, files,
shared memory. Writes one JSON line.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai

from oallama.base.ports import free_port
from oallama.bench.machine import describe
from oallama.bench.script import arguments, note, record
from oallama.modelmaker import make_model

PROMPTS = [f"{word} went to the market and said" for word in ("fox", "cat", "cow", "hen", "ant", "bee")]
LENGTHS = (8, 40, 120)
KINDS = ("completion", "completion stream", "chat", "chat stream")
WRONG: tuple[dict[str, Any], ...] = (
    {"model": "nobody", "prompt": "a"},
    {"prompt": {"a": 1}},
    {"prompt": "a", "max_tokens": "many"},
    {"prompt": "a", "grammar": "root ::= ("},
)
FAULTS = ("kill", "stop", "unload")


@dataclass
class Outcomes:
    """What clients saw. faults: what must not happen, as text."""

    counts: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    slowest_s: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def count(self, what: str) -> None:
        with self._lock:
            self.counts[what] += 1


@dataclass
class Stress:
    client: openai.OpenAI
    port: int
    models: list[Path]
    patience_s: float
    outcomes: Outcomes = field(default_factory=Outcomes)
    expected: dict[tuple[str, str, str, int], str] = field(default_factory=dict)

    def texts(self, kind: str, model: str, prompt: str, n: int, leaves_after: int | None = None) -> tuple[str, int]:
        """The text of an answer, and its tokens by usage. leaves_after: events until the client hangs up."""
        options: dict[str, Any] = {"model": model, "max_tokens": n, "temperature": 0}
        options["extra_body"] = {"ignore_eos": True, "cache_prompt": False}
        if kind.endswith("stream"):
            options |= {"stream": True, "stream_options": {"include_usage": True}}
        if kind.startswith("chat"):
            answer = self.client.chat.completions.create(messages=[{"role": "user", "content": prompt}], **options)
        else:
            answer = self.client.completions.create(prompt=prompt, **options)
        if not kind.endswith("stream"):
            choice = answer.choices[0]
            text = choice.message.content if kind == "chat" else choice.text
            return text or "", answer.usage.completion_tokens
        pieces, n_tokens = [], -1
        for number, event in enumerate(answer):
            if event.choices:
                choice = event.choices[0]
                pieces.append((choice.delta.content if kind == "chat stream" else choice.text) or "")
            if event.usage:
                n_tokens = event.usage.completion_tokens
            if number == leaves_after:
                answer.close()
                return "", n
        return "".join(pieces), n_tokens

    def learn(self) -> None:
        """Texts of single requests while nothing else happens."""
        for model in self.models:
            for kind in KINDS:
                for prompt in PROMPTS:
                    for n in LENGTHS:
                        self.expected[kind, model.stem, prompt, n] = self.texts(kind, model.stem, prompt, n)[0]

    def request(self, seed: int) -> None:
        rng = random.Random(seed)
        model, kind = rng.choice(self.models).stem, rng.choice(KINDS)
        prompt, n = rng.choice(PROMPTS), rng.choice(LENGTHS)
        started = time.monotonic()
        try:
            if rng.random() < 0.05:
                self._wrong(rng.choice(WRONG), model)
            elif kind.endswith("stream") and rng.random() < 0.1:
                self.texts(kind, model, prompt, n, leaves_after=rng.randrange(4))
                self.outcomes.count("left")
            else:
                text, n_tokens = self.texts(kind, model, prompt, n)
                if n_tokens != n:
                    self.outcomes.faults.append(f"{kind}: {n_tokens} tokens of {n}")
                self.outcomes.count("as alone" if text == self.expected[kind, model, prompt, n] else "another text")
        except openai.OpenAIError as error:
            status = f" {error.status_code}" if isinstance(error, openai.APIStatusError) else ""
            self.outcomes.count(f"{type(error).__name__}{status}")
        except Exception as error:
            self.outcomes.faults.append(f"{kind}: {type(error).__name__}: {error}")
        took = time.monotonic() - started
        self.outcomes.slowest_s = max(self.outcomes.slowest_s, took)
        if took > self.patience_s:
            self.outcomes.faults.append(f"{kind}: {took:.0f} s")

    def _wrong(self, body: dict[str, Any], model: str) -> None:
        try:
            self.client.post("/completions", body={"model": model, **body}, cast_to=object)
            self.outcomes.faults.append(f"answered: {body}")
        except (openai.BadRequestError, openai.NotFoundError):
            self.outcomes.count("refused as wrong")

    def disturb(self, every_s: float, ends: threading.Event, done: Counter[str]) -> None:
        rng = random.Random(1)
        while not ends.wait(every_s * rng.uniform(0.5, 1.5)):
            model, what = rng.choice(self.models), rng.choice(FAULTS)
            pids = processes(model)
            if not pids:
                continue  # it is about to be loaded again
            done[what] += 1
            if what == "unload":
                self._unload(model)
                continue
            try:
                os.kill(pids[0], signal.SIGKILL if what == "kill" else signal.SIGSTOP)
                if what == "stop":
                    ends.wait(rng.uniform(0.2, 2.0))
                    os.kill(pids[0], signal.SIGCONT)
            except ProcessLookupError:
                pass

    def _unload(self, model: Path) -> None:
        body = f'{{"model": "{model.stem}"}}'.encode()
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{self.port}/models/unload", body, timeout=60).close()
        except OSError as error:
            self.outcomes.count(f"unload: {error}")


def processes(model: Path) -> list[int]:
    found = subprocess.run(["pgrep", "-f", f"llama-server.*{model}"], capture_output=True, text=True).stdout
    return [int(pid) for pid in found.split()]


def routers(server: int) -> list[int]:
    """Processes of the server that have no model."""
    found = subprocess.run(["pgrep", "-P", str(server), "llama-server"], capture_output=True, text=True).stdout
    return [int(pid) for pid in found.split()]


def resident_mb(pid: int) -> float:
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except OSError:
        return 0.0
    return round(pages * os.sysconf("SC_PAGE_SIZE") / 1e6, 1)


def left_behind() -> set[str]:
    return {str(path) for place in ("/dev/shm", tempfile.gettempdir()) for path in Path(place).glob("oallama-*")}


@contextmanager
def serving(folder: Path, models: Sequence[Path], port: int) -> Iterator[subprocess.Popen[bytes]]:
    command: list[object] = [Path(sys.executable).parent / "oallama", "serve", "--hot", models[0], "--cold", models[1]]
    command += ["--parallel", "2", "--guests", "3", "--ctx", "2048", "--threads", "1", "--deadline", "5"]
    command += ["--no-plan", "--port", port]
    with (folder / "log").open("w") as log, subprocess.Popen(list(map(str, command)), stdout=log, stderr=log) as server:
        try:
            yield server
            server.terminate()
            server.wait(60)
        finally:
            server.kill()


def stressed(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    before = left_behind()
    with tempfile.TemporaryDirectory(prefix="stress-") as name:
        folder, port = Path(name), free_port()
        models = [make_model(folder / f"stress-{arch}.gguf", arch=arch, file_type="F16") for arch in ("llama", "qwen2")]
        with serving(folder, models, port) as server:
            url = f"http://127.0.0.1:{port}/v1"
            client = openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=args.patience)
            line = measured(Stress(client, port, models, args.patience), server.pid, args)
        still_there = [str(pid) for model in models for pid in processes(model)]
    left = sorted(left_behind() - before)
    yield line | {"exit_code": server.returncode, "left": left + still_there}


def measured(stress: Stress, server: int, args: argparse.Namespace) -> dict[str, Any]:
    """All requests; server: the process of `oallama serve`."""
    _until_ready(stress)
    stress.learn()
    (router,) = routers(server)
    note(f"{len(stress.expected)} texts known, router {router}")
    disturbances: Counter[str] = Counter()
    ends, memory, started = threading.Event(), [resident_mb(router)], time.monotonic()
    saboteur = threading.Thread(target=stress.disturb, args=(args.every, ends, disturbances))
    saboteur.start()
    try:
        with ThreadPoolExecutor(args.clients) as pool:
            for number, _ in enumerate(pool.map(stress.request, range(args.requests)), 1):
                if number % 500 == 0:
                    memory.append(resident_mb(router))
                    note(f"{number} requests, {dict(stress.outcomes.counts)}, {len(stress.outcomes.faults)} faults")
    finally:
        ends.set()
        saboteur.join()
    seconds = time.monotonic() - started
    _until_ready(stress)
    return {
        "requests": args.requests,
        "clients": args.clients,
        "seconds": round(seconds, 1),
        "disturbances": dict(disturbances),
        "outcomes": dict(stress.outcomes.counts.most_common()),
        "faults": stress.outcomes.faults,
        "slowest_s": round(stress.outcomes.slowest_s, 1),
        "router_mb": memory,
        "models_mb": {model.stem: resident_mb(processes(model)[0]) for model in stress.models},
    }


def _until_ready(stress: Stress) -> None:
    end = time.monotonic() + 60
    for model in stress.models:
        while True:
            try:
                stress.texts("completion", model.stem, "a", 1)
                break
            except openai.OpenAIError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.2)


def main() -> None:
    parser = arguments(__doc__, "serve-stress")
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--clients", type=int, default=12)
    parser.add_argument("--every", type=float, default=3.0, help="seconds between disturbances, in the mean")
    parser.add_argument("--patience", type=float, default=60.0, help="seconds that an answer may take")
    args = parser.parse_args()
    record(stressed(args), args.out, each={"machine": describe(), "openai": openai.__version__})


if __name__ == "__main__":
    main()
