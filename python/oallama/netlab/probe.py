"""Measures the way between two hosts: round trips, TCP throughput, lost datagrams. Standard library only.

Runs inside the hosts (`probe.py serve`, `probe.py <what> ADDRESS PORT COUNT`); outside, `Probe` starts
both and returns the numbers. A connection says in its first byte what it wants: e (echo), s (count what comes until the
end), u (how many datagrams came to the port of the same number).
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from oallama.netlab.lab import NetLab

MESSAGE = 64  # bytes of a ping and of a datagram


class Probe:
    """A server in host `to`, and measurements from other hosts to it; ends with the lab."""

    def __init__(self, lab: NetLab, to: int) -> None:
        self._lab = lab
        self._to = to
        self._server = lab.popen(to, [sys.executable, __file__, "serve"], stdout=subprocess.PIPE, text=True)
        assert self._server.stdout is not None
        self.port = int(self._server.stdout.readline())

    def round_trips(self, host: int, count: int) -> list[float]:
        """Seconds that each of `count` exchanges of 64 bytes over one connection took."""
        return self._client(host, "round_trips", count)

    def transfer(self, host: int, n_bytes: int) -> float:
        """Seconds from the first byte sent over a new connection until the server had received all."""
        return self._client(host, "transfer", n_bytes)[0]

    def datagrams(self, host: int, count: int) -> int:
        """How many of `count` datagrams (UDP, 64 bytes) arrived."""
        return int(self._client(host, "datagrams", count)[0])

    def command(self, what: str, count: int) -> list[str]:
        """The command that makes one of these measurements, to be run in any host."""
        return [sys.executable, __file__, what, self._lab.address(self._to), str(self.port), str(count)]

    def _client(self, host: int, what: str, count: int) -> list[float]:
        answer = self._lab.run(host, self.command(what, count), stdout=subprocess.PIPE, text=True, check=True).stdout
        return [float(value) for value in json.loads(answer)]


def round_trips(address: str, port: int, count: int) -> list[float]:
    seconds = []
    with _connect(address, port, b"e") as peer:
        for _ in range(count):
            started = time.perf_counter()
            peer.sendall(bytes(MESSAGE))
            _receive(peer, MESSAGE)
            seconds.append(time.perf_counter() - started)
    return seconds


def transfer(address: str, port: int, n_bytes: int) -> list[float]:
    block = memoryview(bytes(1 << 20))
    with _connect(address, port, b"s") as peer:
        _receive(peer, 1)
        started = time.perf_counter()
        for at in range(0, n_bytes, len(block)):
            peer.sendall(block[: min(len(block), n_bytes - at)])
        peer.shutdown(socket.SHUT_WR)
        received = int.from_bytes(_receive(peer, 8), "little")
        seconds = time.perf_counter() - started
    assert received == n_bytes, f"{received} of {n_bytes} bytes arrived"
    return [seconds]


def datagrams(address: str, port: int, count: int) -> list[float]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        for _ in range(count):
            sender.sendto(bytes(MESSAGE), (address, port))
    # Packets do not overtake one another: when the server reads this, every datagram has come or never will.
    with _connect(address, port, b"u") as peer:
        return [int.from_bytes(_receive(peer, 8), "little")]


def serve() -> None:
    """Print the port, then serve one connection after the other."""
    with socket.create_server(("", 0)) as server, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
        udp.bind(server.getsockname())
        udp.setblocking(False)
        # SO_RCVBUFFORCE: what comes before it is asked for must not be lost here.
        udp.setsockopt(socket.SOL_SOCKET, 33, 64 << 20)
        print(server.getsockname()[1], flush=True)
        while True:
            peer, _ = server.accept()
            with peer:
                peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                _answer(peer, udp)


def _answer(peer: socket.socket, udp: socket.socket) -> None:
    what = _receive(peer, 1)
    if what == b"e":
        while data := peer.recv(MESSAGE):
            peer.sendall(data)
    elif what == b"s":
        peer.sendall(b"!")
        buffer, total = bytearray(1 << 20), 0
        while n := peer.recv_into(buffer):
            total += n
        peer.sendall(total.to_bytes(8, "little"))
    else:
        total = 0
        try:
            while udp.recv(MESSAGE):
                total += 1
        except BlockingIOError:
            peer.sendall(total.to_bytes(8, "little"))


def _connect(address: str, port: int, what: bytes) -> socket.socket:
    peer = socket.create_connection((address, port))
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    peer.sendall(what)
    return peer


def _receive(peer: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = peer.recv(size - len(data))
        if not part:
            raise ConnectionError("the peer has hung up")
        data += part
    return data


if __name__ == "__main__":
    clients: dict[str, Callable[[str, int, int], list[float]]] = {
        "round_trips": round_trips,
        "transfer": transfer,
        "datagrams": datagrams,
    }
    if sys.argv[1] == "serve":
        serve()
    else:
        print(json.dumps(clients[sys.argv[1]](sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))))
