"""Where a server listens: refused before it starts, said once it answers."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from oallama.errors import OallamaError
from oallama.serving.door import Address

ADDRESS = Address("127.0.0.1", 8080)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], ADDRESS),
        (["--port", "8081"], Address("127.0.0.1", 8081)),
        (["-np", "2", "--host", "::1", "--port", "9"], Address("::1", 9)),
        (["--port"], ADDRESS),
        (["--port", "many"], ADDRESS),
        (["--ssl-key-file", "key.pem"], Address("127.0.0.1", 8080, secure=True)),
    ],
)
def test_arguments_for_llama_server_come_last(arguments: list[str], expected: Address) -> None:
    assert ADDRESS.changed_by(arguments) == expected


def test_urls() -> None:
    assert ADDRESS.url == "http://127.0.0.1:8080" and Address("::1", 1, secure=True).url == "https://[::1]:1"


def test_a_taken_port_is_told() -> None:
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(("127.0.0.1", 0))
        address = Address("127.0.0.1", taken.getsockname()[1])
        address.check()  # nobody listens yet
        taken.listen()
        with pytest.raises(OallamaError, match=f"^port {address.port} of 127.0.0.1 is taken; .* --port$"):
            address.check()


def test_an_address_of_another_host_is_told() -> None:
    with pytest.raises(OallamaError, match=r"^cannot listen on 192\.0\.2\.1 port 8080: "):
        Address("192.0.2.1", 8080).check()


@pytest.mark.parametrize("address", [Address("127.0.0.1", 0), Address("/tmp/a.sock", 8080)])
def test_what_is_not_known_is_not_checked_and_not_announced(
    address: Address, capsys: pytest.CaptureFixture[str]
) -> None:
    address.check()
    with address.announced("serving m"):
        pass
    assert capsys.readouterr().err == ""


@pytest.fixture
def loading() -> Iterator[tuple[int, threading.Event]]:
    """A server that answers 503 until the event is set."""
    loaded = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if loaded.is_set() and self.path == "/health" else 503)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_address[1], loaded
        server.shutdown()
        thread.join()


def test_a_server_is_announced_once_it_answers(
    loading: tuple[int, threading.Event], capsys: pytest.CaptureFixture[str]
) -> None:
    port, loaded = loading
    with Address("0.0.0.0", port).announced("serving m"):
        time.sleep(0.3)  # some looks in vain
        before = capsys.readouterr().err
        loaded.set()
        until = time.monotonic() + 60
        said = ""
        while not said and time.monotonic() < until:
            time.sleep(0.01)
            said = capsys.readouterr().err
    assert (before, said) == ("", f"serving m on http://0.0.0.0:{port} (OpenAI API under /v1)\n")


def test_a_server_that_never_answers_is_not_waited_for(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        with Address("127.0.0.1", unused.getsockname()[1]).announced("serving m"):
            time.sleep(0.15)
    assert capsys.readouterr().err == ""
