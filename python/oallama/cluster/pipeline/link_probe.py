"""Measures the way between two hosts: an authenticated echo over TCP and UDP, and what a client makes of it.

Standard library only. A connection proves that it knows the token before anything else is read from it: the echo sends
32 random bytes, the client 32 of its own and HMAC-SHA256(token, "client" and both), the echo its own proof. Then every
message is a size (4 bytes, little endian) and so many bytes; the answer is as long, its first byte what `state` says.
Datagrams are echoed to those who know the session's 16 bytes, which come with the proof.
"""

from __future__ import annotations

import hmac
import math
import os
import socket
import statistics
import struct
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass

from ...errors import OallamaError
from ..allocation.network import LinkQuality
from .tcp_loss import TcpLoss

HANDSHAKE_S = 5.0
MAX_MESSAGE = 4 << 20
PAYLOAD = 1 << 20  # of the bandwidth's measurement (docs/sources.md, 5)
PING = 64
_MAX_STRANGERS = 16  # connections that have not proven anything yet
_SESSION = 16
_RANDOM = _DIGEST = 32


class Echo:
    """Answers probes at `address` (port 0: any free one) until `close`.

    state: says what the answers' first byte is; called for every message.
    """

    def __init__(self, address: tuple[str, int], token: bytes, state: Callable[[], int] = lambda: 0) -> None:
        self._token, self._state = token, state
        self._tcp = socket.create_server(address)
        self.address: tuple[str, int] = self._tcp.getsockname()[:2]
        self._udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._udp.bind(self.address)
        self._sessions: set[bytes] = set()
        self._strangers = threading.Semaphore(_MAX_STRANGERS)
        self._closed = False
        for serve in (self._accept, self._datagrams):
            threading.Thread(target=serve, daemon=True).start()

    def close(self) -> None:
        """Stop; connections that are open end with the process."""
        self._closed = True
        self._tcp.close()
        self._udp.close()

    def _accept(self) -> None:
        while not self._closed:
            try:
                peer, _ = self._tcp.accept()
            except OSError:  # the peer has gone again, or there are no descriptors left for now
                time.sleep(0.01)
                continue
            if self._strangers.acquire(blocking=False):
                threading.Thread(target=self._serve, args=(peer,), daemon=True).start()
            else:
                peer.close()

    def _serve(self, peer: socket.socket) -> None:
        session = os.urandom(_SESSION)
        with peer, suppress(OSError):
            try:
                if not self._admit(peer, session):
                    return
            finally:
                self._strangers.release()
            self._sessions.add(session)
            try:
                self._answer(peer)
            finally:
                self._sessions.discard(session)

    def _admit(self, peer: socket.socket, session: bytes) -> bool:
        end = time.monotonic() + HANDSHAKE_S
        challenge = os.urandom(_RANDOM)
        peer.settimeout(HANDSHAKE_S)
        peer.sendall(challenge)
        theirs = bytes(_receive(peer, _RANDOM, end))
        proof = _receive(peer, _DIGEST, end)
        if not hmac.compare_digest(proof, _proof(self._token, b"client", challenge, theirs)):
            return False
        peer.sendall(_proof(self._token, b"echo", challenge, theirs) + session)
        return True

    def _answer(self, peer: socket.socket) -> None:
        peer.settimeout(None)
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        _set_no_delay(peer)
        while True:
            (size,) = struct.unpack("<I", _receive(peer, 4))
            if not 0 < size <= MAX_MESSAGE:
                return
            message = _receive(peer, size)
            message[0] = self._state()
            peer.sendall(message)

    def _datagrams(self) -> None:
        while not self._closed:
            with suppress(OSError):
                message, sender = self._udp.recvfrom(2048)
                if message[:_SESSION] in self._sessions:
                    self._udp.sendto(message, sender)


class EchoClient:
    """A connection to an Echo; a context manager.

    Raises OallamaError when nothing answers there, or what answers does not know the token.
    """

    def __init__(self, address: tuple[str, int], token: bytes, timeout_s: float = HANDSHAKE_S) -> None:
        where = f"{address[0]}:{address[1]}"
        try:
            self._tcp = socket.create_connection(address, timeout=timeout_s)
        except OSError as error:
            raise OallamaError(f"no probe answers at {where}: {error}") from None
        try:
            challenge, ours = bytes(_receive(self._tcp, _RANDOM)), os.urandom(_RANDOM)
            self._tcp.sendall(ours + _proof(token, b"client", challenge, ours))
            if not hmac.compare_digest(_receive(self._tcp, _DIGEST), _proof(token, b"echo", challenge, ours)):
                raise OallamaError(f"what answers at {where} does not know the token")
            self._session = bytes(_receive(self._tcp, _SESSION))
        except TimeoutError:
            self._tcp.close()
            raise OallamaError(f"what answered at {where} was silent for {timeout_s:g} s") from None
        except OSError:
            self._tcp.close()
            raise OallamaError(f"what answers at {where} is no probe of ours, or has another token") from None
        except OallamaError:
            self._tcp.close()
            raise
        self._address = address
        _set_no_delay(self._tcp)

    def __enter__(self) -> EchoClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._tcp.close()

    def round_trip(self, size: int, timeout_s: float | None = None) -> tuple[float, int]:
        """Seconds of `size` bytes there and back, and the answer's first byte. Raises OSError when none comes."""
        self._tcp.settimeout(timeout_s)
        started = time.perf_counter()
        self._tcp.sendall(struct.pack("<I", size) + bytes(size))
        answer = _receive(self._tcp, size)
        return time.perf_counter() - started, answer[0]

    def loss(self) -> TcpLoss:
        """Counts packets lost on the way to the Echo, as TCP does."""
        return TcpLoss(self._tcp)

    def datagrams(self, count: int, interval_s: float) -> list[float]:
        """Seconds there and back of each of `count` datagrams that came back."""
        found: dict[int, float] = {}
        sent: list[float] = []
        finished: list[float] = []
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
            udp.connect(self._address)
            udp.settimeout(0.05)

            def listen() -> None:
                # Until the last one has had time for a way that is far slower than the others'.
                while not finished or time.perf_counter() < finished[0] + max(0.5, 5 * max(found.values(), default=0)):
                    with suppress(OSError):
                        message = udp.recv(2048)
                        now = time.perf_counter()
                        number = int.from_bytes(message[_SESSION : _SESSION + 4], "little")
                        if message[:_SESSION] == self._session and number < len(sent):
                            found.setdefault(number, now - sent[number])
                    if len(found) == count:
                        return

            listener = threading.Thread(target=listen)
            listener.start()
            for number in range(count):
                sent.append(time.perf_counter())
                with suppress(OSError):  # no one listens there: reported as lost
                    udp.send((self._session + struct.pack("<I", number)).ljust(PING, b"\0"))
                time.sleep(interval_s)
            finished.append(time.perf_counter())
            listener.join()
        return list(found.values())


@dataclass(frozen=True)
class Effort:
    """How much is sent to measure a link: about 3 s with the defaults where round trips take 1 ms."""

    pings: int = 400
    interval_s: float = 0.002
    messages: int = 300
    transfers: int = 8
    most_s: float = 6.0


QUICK = Effort(pings=100, messages=50, transfers=3, most_s=2.0)


def measure_link(
    address: tuple[str, int], token: bytes, message_bytes: int, *, datagrams: bool = True, effort: Effort = Effort()
) -> LinkQuality:
    """The quality of the way to the Echo at `address`, taken to be the same in both directions.

    Latency, jitter and loss come from datagrams, of which none is sent twice. Without (`datagrams=False`, through a
    tunnel, or where none comes back) they come from round trips over TCP. Loss is then what TCP had to send again on
    the way from here (`TcpLoss`), of small messages only: large ones lose packets by their own haste. Where TCP's
    counters cannot be read, loss is 0, and lost packets show as jitter.

    The bandwidth is the payload's of messages of 1 MiB, half of a round trip each. The mean of messages of
    `message_bytes` has everything in it that TCP does.

    A loss is paid once in the objective. Its terms are those of latency, bandwidth, jitter and loss
    (`Settings.crossing`), and latency and jitter are here those of round trips without a loss, as datagrams have it.
    `message_s`, which does hold what losses cost, is for predicted times alone (`LinkQuality.mean_s`); they have no
    term for loss.

    Raises:
        OallamaError: when nothing answers, or the connection breaks.
    """
    with EchoClient(address, token) as echo:
        try:
            for _ in range(10):  # the way is awake, TCP's window open
                echo.round_trip(PING, effort.most_s)
            trips = echo.datagrams(effort.pings, effort.interval_s) if datagrams else []
            if trips:
                repeated, loss = None, 1 - (len(trips) / effort.pings) ** 0.5
            else:
                with (repeated := echo.loss()):
                    trips = _until(lambda: echo.round_trip(PING, effort.most_s)[0], effort.pings, effort.most_s / 2)
            large = _until(lambda: echo.round_trip(PAYLOAD, 10 * effort.most_s)[0], effort.transfers, effort.most_s)
            with repeated or nullcontext():
                exact = _until(lambda: echo.round_trip(message_bytes, effort.most_s)[0], effort.messages, effort.most_s)
        except OSError as error:
            raise OallamaError(f"the probe at {address[0]}:{address[1]} broke off: {error}") from None
    if repeated:
        loss = repeated.share
        trips = _without_loss(trips, loss)
    latency = statistics.median(trips) / 2
    return LinkQuality(
        latency_s=latency,
        bandwidth=PAYLOAD / max(statistics.median(large) / 2 - latency, 1e-7),
        jitter_s=_spread(trips) / 2,
        loss=loss,
        message_bytes=message_bytes,
        message_s=statistics.fmean(exact) / 2,
    )


def _until(measure: Callable[[], float], count: int, most_s: float) -> list[float]:
    found: list[float] = []
    end = time.monotonic() + most_s
    while len(found) < count and (not found or time.monotonic() < end):
        found.append(measure())
    return found


def _without_loss(seconds: list[float], loss: float) -> list[float]:
    """Without the round trips in which a packet was lost, there or back: the slowest.

    They are as many as expected and two standard deviations more, because one of them would be taken for jitter.
    """
    share = 1 - (1 - loss) ** 2
    expected = len(seconds) * share
    n = math.ceil(expected + 2 * math.sqrt(expected * (1 - share)))
    return sorted(seconds)[: max(1, len(seconds) - n)]


def _spread(seconds: list[float]) -> float:
    """Largest minus smallest of the middle 98 %: one hiccup of a scheduler is no jitter of the link."""
    ordered = sorted(seconds)
    cut = len(ordered) // 100
    return ordered[-1 - cut] - ordered[cut]


def _proof(token: bytes, who: bytes, challenge: bytes, answer: bytes) -> bytes:
    return hmac.digest(token, who + challenge + answer, "sha256")


def _set_no_delay(peer: socket.socket) -> None:
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _receive(peer: socket.socket, size: int, end: float = math.inf) -> bytearray:
    """Exactly `size` bytes. end: of time.monotonic(); Raises TimeoutError after it, however slowly bytes come."""
    data = bytearray(size)
    view = memoryview(data)
    while view:
        if time.monotonic() > end:
            raise TimeoutError
        n = peer.recv_into(view)
        if not n:
            raise ConnectionError("the peer has hung up")
        view = view[n:]
    return data
