"""What servers refuse when their queue is full, and how they end: one model, and a router of two."""

from __future__ import annotations

import http.client
import json
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from oallama.base.ports import free_port
from oallama.modelmaker import make_model
from support.processes import process_of, until
from support.servers import OALLAMA

LONG = 3000  # tokens; much more than is buffered on the way
ENDLESS = 60000  # more than any machine makes while a test runs
CTX = 65536


class Call:
    """A completion; when this returns it has been answered or refused, and a streamed one has been let in.

    Buffers are small: the server cannot end a long answer before it is read.
    """

    def __init__(self, port: int, model: str, n_tokens: int, stream: bool = True) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port)
        self._connection.sock = self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 536)  # else the sender buffers megabytes
        self._socket.settimeout(120)
        self._socket.connect(("127.0.0.1", port))
        body = {"model": model, "prompt": "a", "max_tokens": n_tokens, "ignore_eos": True, "stream": stream}
        self._connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        self.answer = self._connection.getresponse()

    def rest(self) -> str:
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
        text = self.answer.read().decode()
        self._connection.close()
        return text

    def hang_up(self) -> None:
        self.answer.close()
        self._connection.close()


@contextmanager
def server(models: list[Path], *more: str | int) -> Iterator[tuple[subprocess.Popen[str], int]]:
    port = free_port()
    what = [models[0]] if len(models) == 1 else ["--hot", models[0], "--cold", models[1], "--guests", "0", "--no-plan"]
    metrics = ["--", "--metrics"] if len(models) == 1 else []  # a router's models have them
    own = ["--parallel", "1", "--ctx", CTX, "--threads", "1", "--port", port]
    command = [OALLAMA, "serve", *what, *own, *more, *metrics]
    with process_of(list(map(str, command)), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        until(lambda: process.poll() is not None or all(answers(port, model.stem) for model in models))
        assert process.poll() is None
        yield process, port


def answers(port: int, model: str) -> bool:
    try:
        call = Call(port, model, 1)
    except OSError:
        return False
    return call.answer.status == 200 and "[DONE]" in call.rest()


@pytest.fixture(scope="module", params=[1, 2], ids=["server", "router"])
def models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Tiny models with room for long answers."""
    folder = tmp_path_factory.mktemp("long")
    return [
        make_model(folder / f"{arch}.gguf", arch=arch, file_type="Q8_0", overrides={"n_ctx_train": CTX})
        for arch in ("llama", "qwen2")[: request.param]
    ]


def test_a_full_queue_says_so(models: list[Path]) -> None:
    with server(models, "--queue", 0) as (_, port):
        busy = Call(port, models[0].stem, ENDLESS)
        refused = Call(port, models[0].stem, 1)
        assert refused.answer.status == 503
        assert 1 <= int(refused.answer.headers["Retry-After"]) <= 60
        error = json.loads(refused.rest())["error"]
        assert error["type"] == "unavailable_error" and "queue is full" in error["message"]
        for other in models[1:]:  # its queue is its own
            assert "[DONE]" in Call(port, other.stem, 1).rest()
        busy.hang_up()
        until(lambda: answers(port, models[0].stem))


def test_who_has_read_an_answer_may_ask_again(models: list[Path]) -> None:
    with server(models, "--queue", 0) as (_, port):
        for i in range(100):
            call = Call(port, models[0].stem, 1, stream=i % 2 == 0)
            assert call.answer.status == 200, f"answer {i}"
            call.rest()


def test_a_server_that_ends_answers_first(models: list[Path]) -> None:
    with server(models, "--queue", 0) as (process, port):
        calls = [Call(port, model.stem, LONG) for model in models]
        process.send_signal(signal.SIGTERM)
        end = time.monotonic() + 60
        # The signal is on its way. On a busy machine the long answer may be computed before it comes, and a slot free.
        while "the server ends" not in (late := Call(port, models[0].stem, 1)).rest():
            assert late.answer.status in (200, 503) and time.monotonic() < end
        assert late.answer.status == 503 and int(late.answer.headers["Retry-After"]) > 0
        assert all('"finish_reason":"length"' in call.rest() for call in calls) and process.wait(60) == 0


def test_a_burst_is_let_in_at_once(models: list[Path]) -> None:
    """More requests at one moment than the server has threads: none waits for another's answer to be read."""
    n = 40
    body = json.dumps({"model": models[0].stem, "prompt": "a", "max_tokens": ENDLESS, "ignore_eos": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    with server(models, "--queue", n, "--drain", 0.2) as (_, port), ExitStack() as stack:
        for _ in range(n):
            client = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=60))
            client.sendall(f"{head}\r\n\r\n".encode() + body)
        until(lambda: requests_known(port, models[0].stem) == n)


def requests_known(port: int, model: str) -> float:
    """Requests that a model answers or keeps waiting."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics?model={model}", timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    values = dict(line.split() for line in lines if not line.startswith("#"))
    return float(values["llamacpp:requests_processing"]) + float(values["llamacpp:requests_deferred"])


def test_a_drain_has_an_end(models: list[Path]) -> None:
    model = models[0].stem
    with server(models, "--drain", 0.2) as (process, port), ThreadPoolExecutor() as threads:
        streamed = threads.submit(Call(port, model, ENDLESS).rest)
        whole = threads.submit(Call, port, model, ENDLESS, stream=False)
        until(lambda: requests_known(port, model) == 2)
        process.send_signal(signal.SIGTERM)
        assert process.wait(25) == 0  # a stream without results is looked at again every 30 s
        with pytest.raises(http.client.IncompleteRead):
            streamed.result()
        assert whole.result().answer.status == 503 and "the server ends" in whole.result().rest()


def test_a_client_that_reads_nothing_keeps_no_server(models: list[Path]) -> None:
    with server(models, "--drain", 1) as (process, port):
        call = Call(port, models[0].stem, ENDLESS)
        process.send_signal(signal.SIGTERM)
        assert process.wait(25) == 0
        with pytest.raises(http.client.IncompleteRead):
            call.rest()
