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
from pathlib import Path
from typing import Any

from oallama.engine.rpc import free_port
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
def serving(log: Path, *arguments: str | Path, more: Sequence[str] = ()) -> Iterator[int]:
    """The port of a server that says everything in its log: more than a pipe holds that nobody reads.

    more: arguments of llama-server.
    """
    port = free_port()
    command = [*CLI, "serve", *map(str, arguments), "--port", str(port), "--", "-lv", "5", *more]
    with log.open("wb") as file, subprocess.Popen(command, stdout=file, stderr=file) as process:
        try:
            end = time.monotonic() + 90
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
