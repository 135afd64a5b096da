"""The probe between hosts: who may use it, and what it makes of emulated links."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from oallama.cluster.pipeline.link_probe import Echo, EchoClient, Effort, measure_link
from oallama.errors import OallamaError
from oallama.netlab import Conditions, NetLab
from support.lab import needs_lab
from support.processes import process_of

TOKEN = bytes(range(32))


@pytest.fixture
def echo() -> Iterator[Echo]:
    found = Echo(("127.0.0.1", 0), TOKEN, lambda: 7)
    yield found
    found.close()


def test_messages_come_back_with_the_state(echo: Echo) -> None:
    with EchoClient(echo.address, TOKEN) as client:
        for size in (1, 64, 65536, 4 << 20):
            seconds, state = client.round_trip(size, 5.0)
            assert seconds > 0 and state == 7
        assert len(client.datagrams(50, 0.001)) >= 45


def test_another_token_is_refused_by_either_side(echo: Echo) -> None:
    with pytest.raises(OallamaError, match="is no probe of ours, or has another token"):
        EchoClient(echo.address, b"wrong")
    impostor = socket.create_server(("127.0.0.1", 0))
    with pytest.raises(OallamaError, match="does not know the token"), impostor:
        # It is there first and answers all, but cannot prove anything.
        code = (
            "import socket, sys; s = socket.socket(fileno=int(sys.argv[1])); c, _ = s.accept(); c.sendall(bytes(32)); "
            "c.recv(32); c.sendall(bytes(64)); c.recv(1)"
        )
        with process_of([sys.executable, "-c", code, str(impostor.fileno())], pass_fds=(impostor.fileno(),)):
            EchoClient(impostor.getsockname(), TOKEN)


def test_strangers_get_nothing(echo: Echo) -> None:
    """Neither a datagram without a session nor a message too large nor silence ties the echo up."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
        udp.connect(echo.address)
        udp.settimeout(0.3)
        udp.send(os.urandom(64))
        with pytest.raises(TimeoutError):
            udp.recv(64)
    silent = [socket.create_connection(echo.address) for _ in range(40)]
    time.sleep(6)  # longer than the handshake may take
    with EchoClient(echo.address, TOKEN) as client:
        client.round_trip(64, 5.0)
        with pytest.raises(OSError):
            client.round_trip(8 << 20, 5.0)
    for connection in silent:
        connection.close()
    with pytest.raises(OallamaError, match=r"no probe answers at 127\.0\.0\.1:1: "):
        EchoClient(("127.0.0.1", 1), TOKEN)


@needs_lab
def test_emulated_links_are_found_as_they_are() -> None:
    """A lab's delay, rate and loss; the code runs in its hosts. Bounds that a busy machine cannot break."""
    serve = (
        "import sys, time; from oallama.cluster.pipeline.link_probe import Echo; "
        "echo = Echo((sys.argv[1], 0), bytes(range(32))); print(echo.address[1], flush=True); time.sleep(99)"
    )
    measure = (
        "import json, sys; from oallama.cluster.pipeline.link_probe import measure_link; "
        "print(json.dumps(vars(measure_link((sys.argv[1], int(sys.argv[2])), bytes(range(32)), 16384))))"
    )
    with NetLab(2, Conditions(rate_bit=1e8, delay_s=2e-3, jitter_s=1e-3, loss=0.02)) as lab:
        server = lab.popen(1, [sys.executable, "-c", serve, lab.address(1)], stdout=subprocess.PIPE, text=True)
        assert server.stdout is not None
        port = server.stdout.readline().strip()
        done = lab.run(0, [sys.executable, "-c", measure, lab.address(1), port], capture_output=True, check=True)
    found = json.loads(done.stdout)
    assert found["latency_s"] > 1.8e-3
    assert found["jitter_s"] > 0.5e-3
    assert found["loss"] > 0.003
    assert found["bandwidth"] < 12.6e6
    assert found["message_s"] > found["latency_s"]


def test_a_link_without_datagrams_is_measured_by_tcp(echo: Echo) -> None:
    effort = Effort(pings=30, messages=20, transfers=2, most_s=2.0)
    found = measure_link(echo.address, TOKEN, 4096, datagrams=False, effort=effort)
    assert found.loss == 0 and found.latency_s > 0 and found.message_bytes == 4096 and found.message_s > 0
