"""Where a server listens: whether it can, and word when it does."""

from __future__ import annotations

import errno
import socket
import ssl
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise

from oallama.base.printing import say
from oallama.errors import OallamaError

_EVERY_S = 0.1
_ANY = ("0.0.0.0", "::")


@dataclass
class Answered:
    """since: when a server first answered, as time.monotonic; None: it has not."""

    since: float | None = None

    def seconds(self) -> float:
        """Since then; 0 where it has not answered."""
        return 0.0 if self.since is None else time.monotonic() - self.since


@dataclass(frozen=True)
class Address:
    """host, port: as llama-server takes them. secure: whether it speaks TLS."""

    host: str
    port: int
    secure: bool = False

    def changed_by(self, arguments: Sequence[str]) -> Address:
        """The address that arguments for llama-server give in place of this one."""
        given = dict(pairwise(arguments))  # an option -> what comes after it
        port = given.get("--port", "")
        secure = self.secure or "--ssl-key-file" in given
        return Address(given.get("--host", self.host), int(port) if port.isdecimal() else self.port, secure)

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.secure else 'http'}://{host}:{self.port}"

    @property
    def is_known(self) -> bool:
        """Not so where the system chooses the port, and for a socket that is a file."""
        return self.port > 0 and not self.host.endswith(".sock")

    def check(self) -> None:
        """Raises OallamaError where nobody can listen there, because the port is taken, for example."""
        if not self.is_known:
            return
        try:
            family, kind, protocol, _, place = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)[0]
            with socket.socket(family, kind, protocol) as trial:
                trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                trial.bind(place)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise OallamaError(f"port {self.port} of {self.host} is taken; choose another one by --port") from None
            raise OallamaError(f"cannot listen on {self.host} port {self.port}: {error.strerror}") from None

    @contextmanager
    def announced(self, what: str) -> Iterator[Answered]:
        """Within the block a line says `what` and where, once the server answers there."""
        answered, ended = Answered(), threading.Event()
        if not self.is_known:
            yield answered
            return
        watcher = threading.Thread(target=self._announce, args=(what, answered, ended), daemon=True)
        watcher.start()
        try:
            yield answered
        finally:
            ended.set()
            watcher.join()

    def _announce(self, what: str, answered: Answered, ended: threading.Event) -> None:
        here = Address("127.0.0.1", self.port, self.secure) if self.host in _ANY else self
        while not answers(here.url):
            if ended.wait(_EVERY_S):
                return
        answered.since = time.monotonic()
        say(f"{what} on {self.url} (OpenAI API under /v1)")


def answers(url: str) -> bool:
    """Whether llama-server is there and has loaded its model."""
    unchecked = ssl._create_unverified_context()  # its own certificate is of no interest here
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=2.0, context=unchecked):
            return True
    except (OSError, ValueError):  # not up yet, or still loading
        return False
