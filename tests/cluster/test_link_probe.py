"""The probe between hosts: who may use it, and what it makes of emulated links."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from oallama.cluster.allocation.network import LinkQuality
from oallama.cluster.pipeline import tcp_loss
from oallama.cluster.pipeline.link_probe import Echo, EchoClient, Effort, _without_loss, measure_link
from oallama.cluster.pipeline.tcp_loss import Sent
from oallama.errors import OallamaError
from oallama.netlab import Conditions, NetLab
from support.lab import needs_lab
from support.processes import process_of
from support.ssh import needs_sshd, sshd_on

TOKEN = bytes(range(32))
SERVE = (
    "import sys, time; from oallama.cluster.pipeline.link_probe import Echo; "
    "echo = Echo((sys.argv[1], 0), bytes(range(32))); print(echo.address[1], flush=True); time.sleep(999)"
)


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


def echo_in(lab: NetLab, host: int, address: str) -> str:
    """Its port."""
    server = lab.popen(host, [sys.executable, "-c", SERVE, address], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    return str(server.stdout.readline().strip())


@needs_lab
def test_emulated_links_are_found_as_they_are() -> None:
    """A lab's delay, rate and loss; the code runs in its hosts. Bounds that a busy machine cannot break."""
    measure = (
        "import json, sys; from oallama.cluster.pipeline.link_probe import measure_link; "
        "print(json.dumps(vars(measure_link((sys.argv[1], int(sys.argv[2])), bytes(range(32)), 16384))))"
    )
    with NetLab(2, Conditions(rate_bit=1e8, delay_s=2e-3, jitter_s=1e-3, loss=0.02)) as lab:
        port = echo_in(lab, 1, lab.address(1))
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


# A port of this host that leads to another one, as `ssh -L` makes it; more: whether it has another connection, too.
FORWARD = """
import socket, sys, threading
to, more = ("127.0.0.1", int(sys.argv[1])), sys.argv[2] == "more"
entry = socket.create_server(("127.0.0.1", 0))
print(entry.getsockname()[1], flush=True)
here, there = entry.accept()[0], socket.create_connection(to)
others = [socket.create_connection(to)] if more else []

def pass_on(source, target):
    while data := source.recv(65536):
        target.sendall(data)

threading.Thread(target=pass_on, args=(there, here), daemon=True).start()
pass_on(here, there)
"""


@contextmanager
def forward(echo: Echo, more: str = "") -> Iterator[EchoClient]:
    command = [sys.executable, "-c", FORWARD, str(echo.address[1]), more]
    with process_of(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        with EchoClient(("127.0.0.1", int(process.stdout.readline())), TOKEN) as client:
            yield client


def test_packets_of_a_tunnel_are_those_of_its_process(echo: Echo) -> None:
    """Only those within the blocks; the sockets that the process listens on, or is reached by, are not the tunnel."""
    with forward(echo) as client:
        client.round_trip(64, 5.0)
        loss = client.loss()
        for n in (10, 20):
            client.round_trip(64, 5.0)
            with loss:
                for _ in range(n):
                    client.round_trip(64, 5.0)
        assert 30 <= loss.counted.packets <= 62  # a message may be two packets: size, content
        assert loss.share == 0


def test_where_the_way_is_not_known_nothing_is_counted(echo: Echo, monkeypatch: pytest.MonkeyPatch) -> None:
    """The echo is in this process; a tunnel with two connections; a kernel that does not tell."""
    with EchoClient(echo.address, TOKEN) as client:
        assert counted(client) == Sent()
    with forward(echo, "more") as client:
        assert counted(client) == Sent()

    def refuse() -> Iterator[object]:
        raise OSError

    with forward(echo) as client:
        monkeypatch.setattr(tcp_loss, "_sockets", refuse)
        assert counted(client) == Sent()


def counted(client: EchoClient) -> Sent:
    with (loss := client.loss()):
        client.round_trip(64, 5.0)
    assert loss.share == 0
    return loss.counted


def test_the_share_of_lost_packets(monkeypatch: pytest.MonkeyPatch, echo: Echo) -> None:
    """Over all blocks; late news may take one back, and all lost is no share that a link can have."""
    with EchoClient(echo.address, TOKEN) as client:
        for told, share in (
            ([(10, 0), (110, 5), (500, 90), (600, 88)], 3 / 200),
            ([(10, 5), (110, 4)], 0.0),
            ([(10, 0), (20, 10)], 0.9),
        ):
            states = iter(told)
            loss = client.loss()
            monkeypatch.setattr(loss, "_read", lambda states=states: Sent(*next(states)))
            for _ in range(len(told) // 2):
                with loss:
                    pass
            assert loss.share == pytest.approx(share)


def test_round_trips_with_a_loss_are_no_jitter() -> None:
    trips = [0.3] * 9 + [1e-3 + 1e-6 * n for n in range(391)]
    assert max(_without_loss(trips, 0.01)) < 2e-3
    assert sorted(_without_loss(trips, 0.0)) == sorted(trips)
    assert _without_loss([0.1, 0.2], 0.9) == [0.1]


# In a host of a lab: measures through a tunnel, as a device's Member does, or directly.
MEASURE_BY_TCP = """
import json, sys
from oallama.cluster.allocation.devices import DeviceEntry
from oallama.cluster.pipeline.link_probe import Effort, measure_link
from oallama.cluster.pipeline.remote import Tunnel

way, host, port, *options = sys.argv[1:]
effort = Effort(pings=200, messages=200, transfers=1, most_s=60.0)
if way == "direct":
    found = measure_link((host, int(port)), bytes(range(32)), 16384, datagrams=False, effort=effort)
else:
    entry = DeviceEntry("a", host, ("127.0.0.1", int(port)), 1, ssh_options=tuple(options))
    tunnel = Tunnel(entry, int(port))
    found = measure_link(tunnel.address, bytes(range(32)), 16384, datagrams=False, effort=effort)
    tunnel.close()
print(json.dumps(vars(found)))
"""


@needs_lab
@needs_sshd
@pytest.mark.parametrize("way", ["tunnel", "direct"])
def test_without_datagrams_loss_is_what_tcp_sends_again(way: str, tmp_path: Path) -> None:
    """3 % of some two thousand packets; and none."""
    found = {}
    for share in (0.03, 0.0):
        with NetLab(2, Conditions(rate_bit=1e8, delay_s=1e-3, loss=share)) as lab:
            options: list[str] = []
            if way == "tunnel":
                (folder := tmp_path / str(share)).mkdir()
                command, options = sshd_on(folder, lab.address(1), 22)
                lab.popen(1, command, stderr=subprocess.DEVNULL)
            port = echo_in(lab, 1, "127.0.0.1" if way == "tunnel" else lab.address(1))
            arguments = [way, lab.address(1), port, *options]
            done = lab.run(0, [sys.executable, "-c", MEASURE_BY_TCP, *arguments], stdout=subprocess.PIPE, check=True)
            found[share] = LinkQuality(**json.loads(done.stdout))
    assert 0.01 < found[0.03].loss < 0.09
    assert found[0.0].loss < 0.003
    # What was lost takes 0.2 s more: that is no jitter of the link, and yet part of what a message takes.
    assert found[0.03].jitter_s < 0.1 and found[0.03].message_s > found[0.0].message_s
