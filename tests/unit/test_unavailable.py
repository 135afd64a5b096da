"""503 until another server listens on the same port."""

import http.client
import json
import socket
from contextlib import closing
from pathlib import Path

import pytest

from oallama.base.ports import free_port
from oallama.serving.door import Address
from oallama.serving.unavailable import unavailable
from support.processes import until
from support.servers import is_open

WHY = "the model is loaded again"


def ask(port: int, method: str, body: str | None = None) -> tuple[int, str | None, bytes]:
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=10)) as connection:
        connection.request(method, "/v1/completions", body)
        answer = connection.getresponse()
        return answer.status, answer.getheader("Retry-After"), answer.read()


def test_every_request_gets_503() -> None:
    port = free_port()
    with unavailable(Address("127.0.0.1", port), WHY):
        for method, sent in (("GET", None), ("POST", json.dumps({"prompt": "a" * 3000})), ("PURGE", None)):
            status, retry, body = ask(port, method, sent)
            assert (status, retry) == (503, "5")
            assert json.loads(body)["error"] == {"code": 503, "message": WHY, "type": "unavailable_error"}
        assert ask(port, "HEAD") == (503, "5", b"")
        with socket.create_connection(("127.0.0.1", port), timeout=10) as raw:  # nonsense harms nobody
            raw.sendall(b"\x16\x03\x01 what\r\n\r\n")
            raw.recv(1000)
        assert ask(port, "GET")[0] == 503
    assert not is_open(port)


def test_it_gives_way_to_the_next_server() -> None:
    port = free_port()
    with unavailable(Address("127.0.0.1", port), WHY) as next_starts, socket.socket() as other:
        assert ask(port, "GET")[0] == 503
        next_starts()
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        other.bind(("127.0.0.1", port))
        other.listen(16)
        other.setblocking(False)
        answered: list[object] = []

        def comes_in() -> bool:
            try:
                with socket.create_connection(("127.0.0.1", port), timeout=10):
                    answered.append(other.accept()[0].close())
            except (BlockingIOError, ConnectionError):  # it came to the one that ends
                answered.clear()
            return len(answered) == 20  # in a row

        until(comes_in)


@pytest.mark.parametrize(
    "address", [Address("127.0.0.1", 0), Address("/tmp/x.sock", 80), Address("127.0.0.1", 1, True)]
)
def test_where_nothing_can_answer_the_block_runs(address: Address, tmp_path: Path) -> None:
    with unavailable(address, WHY):
        (tmp_path / "ran").touch()
    assert (tmp_path / "ran").exists()


def test_a_port_that_somebody_else_has_is_left_alone() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = int(other.getsockname()[1])
        with unavailable(Address("127.0.0.1", port), WHY):
            pass
        assert is_open(port)
