"""How clients learn that a request was wrong, or a model's process died: a server of one model, and a router of two."""

from __future__ import annotations

import http.client
import json
import os
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from oallama.base.ports import free_port
from oallama.modelmaker import make_model
from support.processes import process_of, until
from support.servers import OALLAMA, answers, call, children, serving

CTX = 65536
ENDLESS = 60000  # tokens; more than any machine makes while a test runs

WRONG: dict[str, tuple[str, bytes | dict[str, Any]]] = {
    "no JSON": ("/v1/completions", b'{"prompt": '),
    "no object": ("/v1/chat/completions", b"[]"),
    "a number as text": ("/v1/completions", {"prompt": "a", "max_tokens": "many"}),
    "a grammar": ("/v1/completions", {"prompt": "a", "grammar": "root ::= ("}),
    "a schema": ("/v1/completions", {"prompt": "a", "json_schema": {"$ref": "#/nowhere"}}),
    "a schema of a chat": (
        "/v1/chat/completions",
        {"messages": [], "response_format": {"type": "json_schema", "json_schema": {"schema": {"$ref": "#/nowhere"}}}},
    ),
    "a message without a role": ("/v1/chat/completions", {"messages": [{"content": "a"}]}),
    "a tool without a function": ("/v1/chat/completions", {"messages": [], "tools": [{"type": "function"}]}),
}


@dataclass(frozen=True)
class Server:
    port: int
    models: list[Path]

    def post(self, path: str, body: bytes | dict[str, Any]) -> http.client.HTTPResponse:
        if isinstance(body, dict):
            body = json.dumps({"model": self.models[0].stem} | body).encode()
        kind = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", body, kind)
        return urllib.request.urlopen(request, timeout=120)  # type: ignore[no-any-return]

    def refusal(self, path: str, body: bytes | dict[str, Any]) -> tuple[int, dict[str, Any]]:
        with pytest.raises(urllib.error.HTTPError) as refused:
            self.post(path, body)
        return refused.value.code, json.loads(refused.value.read())["error"]

    def is_loaded(self, model: Path) -> bool:
        """Asked of the router alone: that loads nothing."""
        listed = {each["id"]: each["status"]["value"] for each in call(self.port, "/v1/models")["data"]}
        return listed[model.stem] == "loaded"


def made(folder: Path, n: int) -> list[Path]:
    return [
        make_model(folder / f"{arch}.gguf", arch=arch, file_type="Q8_0", overrides={"n_ctx_train": CTX})
        for arch in ("llama", "qwen2")[:n]
    ]


def options(models: list[Path]) -> list[str | Path]:
    what = models if len(models) == 1 else ["--hot", models[0], "--cold", models[1], "--guests", "0", "--no-plan"]
    return [*what, "--parallel", "1", "--ctx", str(CTX), "--threads", "1"]


@pytest.fixture(scope="module", params=[1, 2], ids=["server", "router"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("ends")
    models = made(folder, request.param)
    with serving(folder / "log", *options(models)) as port:
        until(lambda: all(answers(port, model) for model in models))
        yield Server(port, models)


@pytest.fixture
def router(tmp_path: Path) -> Iterator[Server]:
    models = made(tmp_path, 2)
    with serving(tmp_path / "log", *options(models)) as port:
        until(lambda: all(answers(port, model) for model in models))
        yield Server(port, models)


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_request_is_told_so(server: Server, wrong: str) -> None:
    status, error = server.refusal(*WRONG[wrong])
    assert status == error["code"] == 400 and error["type"] == "invalid_request_error" and error["message"]
    assert answers(server.port, server.models[0])


def test_a_connection_serves_several_streams(server: Server) -> None:
    """A client that keeps its connection is not cut off after a whole answer."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.connect()
    connection.auto_open = 0  # it would connect again, and say nothing
    body = json.dumps({"model": server.models[0].stem, "prompt": "a", "max_tokens": 2, "stream": True})
    for _ in range(3):
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        assert connection.getresponse().read().endswith(b"data: [DONE]\n\n")
        time.sleep(0.2)
    connection.close()


def test_models_that_are_none(router: Server) -> None:
    """A server of one model takes any name."""
    status, error = router.refusal("/v1/completions", {"model": "nobody", "prompt": "a"})
    assert status == 404 and error["message"].startswith("model 'nobody' not found; there are: ")
    assert all(model.stem in error["message"] for model in router.models)
    status, error = router.refusal("/v1/completions", {"model": {"a": 1}, "prompt": "a"})
    assert status == 400 and error["message"]


def killed(server: Server, model: Path) -> None:
    (pid,) = children(model)
    os.kill(pid, signal.SIGKILL)
    until(lambda: pid not in children(model))


def is_back(server: Server, model: Path) -> bool:
    return len(children(model)) == 1 and server.is_loaded(model)


@pytest.mark.parametrize("which", [0, 1], ids=["hot", "cold"])
def test_a_cut_stream_does_not_look_whole(router: Server, which: int) -> None:
    model = router.models[which]
    body = {"model": model.stem, "prompt": "a", "max_tokens": ENDLESS, "ignore_eos": True, "stream": True}
    answer = router.post("/v1/completions", body)
    assert answer.readline().startswith(b"data: {")
    killed(router, model)
    with pytest.raises(http.client.IncompleteRead) as cut:
        answer.read()
    *events, last = cut.value.partial.decode().strip().split("\n\n")
    kind, said = last.split("\n")
    assert kind == "event: error"
    assert "did not end its answer" in json.loads(said.removeprefix("data: "))["error"]["message"]
    assert all(json.loads(event.removeprefix("data: "))["choices"] for event in events)


def test_a_request_of_a_model_that_dies_can_be_tried_again(router: Server) -> None:
    model = router.models[0]
    with ThreadPoolExecutor() as threads:
        body = {"prompt": "a", "max_tokens": ENDLESS, "ignore_eos": True}
        refused = threads.submit(router.refusal, "/v1/completions", body)
        until(lambda: call(router.port, f"/slots?model={model.stem}")[0]["is_processing"])
        killed(router, model)
        status, error = refused.result()
    assert status == error["code"] == 502 and "did not answer" in error["message"]
    until(lambda: answers(router.port, model))


def test_a_model_that_dies_is_loaded_again(router: Server) -> None:
    """Nobody asks for it meanwhile. It waits longer where it dies again."""
    hot, cold = router.models
    for model in (hot, cold):
        killed(router, model)
        until(lambda died=model: is_back(router, died))  # type: ignore[misc]
    killed(router, cold)
    died = time.monotonic()
    until(lambda: is_back(router, cold))
    assert time.monotonic() - died > 1.4
    assert answers(router.port, hot) and answers(router.port, cold)


def test_an_unloaded_model_is_not_loaded_again(router: Server) -> None:
    """Neither one that runs, nor one that has died and waits."""
    hot, cold = router.models
    call(router.port, "/models/unload", {"model": hot.stem})
    for _ in range(3):
        killed(router, cold)
        until(lambda: is_back(router, cold))
    killed(router, cold)  # waits for 4.5 s now
    until(lambda: not router.is_loaded(cold))
    status, _ = router.refusal("/models/unload", {"model": cold.stem})
    assert status == 400
    time.sleep(6)
    assert not children(hot) and not children(cold)
    assert answers(router.port, hot) and answers(router.port, cold)


def test_a_server_that_ends_loads_nothing(tmp_path: Path) -> None:
    """While it drains a model dies, as where systemd ends all processes: a stream of the other one is still served."""
    models, port = made(tmp_path, 2), free_port()
    with (tmp_path / "log").open("w") as log:
        command = [OALLAMA, "serve", *options(models), "--port", str(port), "--drain", "3"]
        with process_of(command, stdout=log, stderr=log) as process:
            until(lambda: all(answers(port, model) for model in models))
            server = Server(port, models)
            body = {"model": models[0].stem, "prompt": "a", "max_tokens": ENDLESS, "ignore_eos": True, "stream": True}
            stream = server.post("/v1/completions", body)
            process.send_signal(signal.SIGTERM)
            until(lambda: not answers(port, models[1]))
            killed(server, models[1])
            assert process.wait(60) == 0
            stream.close()
    assert "loaded again" not in (tmp_path / "log").read_text()
    assert not any(children(model) for model in models)
