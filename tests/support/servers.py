"""Clients of the servers that `oallama serve` starts."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oallama.base.ports import free_port
from support.cli import CLI

OALLAMA = str(Path(sys.executable).parent / "oallama")
WORDS = ("fox", "cat", "cow", "hen", "ant", "bee")
PROMPTS = [f"{word} jumps over the lazy dog and goes on for a while" for word in WORDS]


def call(port: int, path: str, body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        text = answer.read().decode()
    return text if path.startswith("/metrics") else json.loads(text)


def is_open(port: int) -> bool:
    """Whether somebody listens there."""
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True


def complete(port: int, model: Path, prompt: str, n: int = 24) -> str:
    body = {"model": model.stem, "prompt": prompt, "max_tokens": n, "temperature": 0, "cache_prompt": False}
    return str(call(port, "/v1/completions", body)["choices"][0]["text"])


@dataclass(frozen=True)
class Greedy:
    """A greedy answer: its slot, its tokens, and the log-probabilities of the likeliest two at each of them.

    llama-server tells none of a token that ends within a character: None.
    """

    slot: int
    tokens: list[int]
    likeliest: list[tuple[float, float] | None]


def greedy(port: int, model: Path, prompt: str, n: int = 16) -> Greedy:
    body = {"model": model.stem, "prompt": prompt, "n_predict": n, "temperature": 0, "cache_prompt": False}
    answer = call(port, "/completion", {**body, "ignore_eos": True, "return_tokens": True, "n_probs": 2})
    told: list[dict[str, Any]] = answer["completion_probabilities"]
    likeliest: list[tuple[float, float] | None] = []
    for token in answer["tokens"]:
        if told and told[0]["id"] == token:
            first, second = (one["logprob"] for one in told.pop(0)["top_logprobs"])
            likeliest.append((first, second))
        else:
            likeliest.append(None)
    assert not told and len(likeliest) == n
    return Greedy(int(answer["id_slot"]), answer["tokens"], likeliest)


def alike(one: Greedy, other: Greedy, tolerance: float = 0.03) -> bool:
    """Whether both are the same but for rounding: up to the end, or up to a near tie, where the texts may part.

    Other sequences in a batch, and guests, change the order of sums. tolerance: of log-probabilities, in nats; what
    a small model's sums change is 0.011 at most.
    """
    for a, b, p, q in zip(one.tokens, other.tokens, one.likeliest, other.likeliest, strict=True):
        if p and q and abs(p[0] - q[0]) > tolerance:
            return False
        if a != b:
            return any(two is not None and two[0] - two[1] <= tolerance for two in (p, q))
    return True


def answers(port: int, model: Path) -> bool:
    try:
        complete(port, model, "a", 1)
    except OSError:
        return False
    return True


def children(model: Path) -> list[int]:
    found = subprocess.run(["pgrep", "-f", f"llama-server.*{model}"], capture_output=True, text=True).stdout
    return [int(pid) for pid in found.split()]


@contextmanager
def serving(log: Path, *arguments: str | Path, more: Sequence[str] = (), seconds: float = 90.0) -> Iterator[int]:
    """The port of a server that says everything in its log: more than a pipe holds that nobody reads.

    more: arguments of llama-server. seconds: that it may take to come up; longer where it makes plans.
    """
    port = free_port()
    command = [*CLI, "serve", *map(str, arguments), "--port", str(port), "--", "-lv", "5", *more]
    with log.open("wb") as file, subprocess.Popen(command, stdout=file, stderr=file) as process:
        try:
            end = time.monotonic() + seconds
            while True:
                assert process.poll() is None and time.monotonic() < end, log.read_text(errors="replace")[-3000:]
                try:
                    if call(port, "/health")["status"] == "ok":
                        break
                except (urllib.error.URLError, OSError):
                    time.sleep(0.1)
            yield port
        finally:
            process.terminate()  # llama-server's log is complete when it has ended
