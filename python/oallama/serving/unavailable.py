"""503 for every request while there is no server: from the end of one that died until the next one listens."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socketserver import TCPServer

from .door import Address

REUSE_PORT = "--reuse-port"  # of a llama-server that is to listen beside it
_RETRY_AFTER_S = 5
_MOST_BYTES = 16 << 20  # of a request that are read
_PIECE = 1 << 16
_EVERY_S = 0.1
_LISTENS = "0A"


@contextmanager
def unavailable(address: Address, why: str) -> Iterator[Callable[[], None]]:
    """Within the block requests get 503, Retry-After and `why`. Yields what is called before the next server starts.

    From then on this one ends when another one listens on the same port, which has to be started with REUSE_PORT.
    Nothing answers where the address is not known or speaks TLS, or somebody else has the port.
    """
    server = None
    if address.is_known and not address.secure:
        with suppress(OSError):
            server = _Server(address, why)
    if server is None:
        yield lambda: None
        return
    before = _listeners(address.port)
    next_starts, ended = threading.Event(), threading.Event()
    if before == 0:  # nor would the next one be seen
        next_starts.set()
        ended.set()
    threads = [
        threading.Thread(target=server.serve_forever, args=(_EVERY_S,), daemon=True),
        threading.Thread(target=_until_another_listens, args=(server, before, next_starts, ended), daemon=True),
    ]
    for thread in threads:
        thread.start()
    try:
        yield next_starts.set
    finally:
        ended.set()
        next_starts.set()
        for thread in threads:
            thread.join()


class _Server(ThreadingHTTPServer):
    def __init__(self, address: Address, why: str) -> None:
        self.address_family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        error = {"code": 503, "message": why, "type": "unavailable_error"}  # as llama-server's
        self.body = json.dumps({"error": error}).encode()
        super().__init__((address.host, address.port), _Refusal)

    def server_bind(self) -> None:
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        TCPServer.server_bind(self)  # HTTPServer's looks for the host's name, which may take long
        self.server_name, self.server_port = self.server_address[:2]  # type: ignore[assignment]

    def handle_error(self, request: object, client_address: object) -> None:
        """Nothing: a client that went away."""


class _Refusal(BaseHTTPRequestHandler):
    server: _Server
    timeout = 10.0

    def handle_one_request(self) -> None:
        self.close_connection = True
        self.raw_requestline = self.rfile.readline(1 << 16)
        if not self.raw_requestline or not self.parse_request():
            return
        length = self.headers.get("Content-Length", "")
        left = min(int(length) if length.isdecimal() else 0, _MOST_BYTES)
        while left > 0 and (piece := self.rfile.read(min(left, _PIECE))):
            left -= len(piece)
        self.send_response(503)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(self.server.body)))
        self.send_header("Retry-After", str(_RETRY_AFTER_S))
        self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(self.server.body)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: each request is an error that its client sees."""


def _until_another_listens(server: _Server, before: int, next_starts: threading.Event, ended: threading.Event) -> None:
    next_starts.wait()  # Linux takes milliseconds to list all sockets: not while a profile is taken
    while not ended.wait(_EVERY_S) and _listeners(server.server_port) <= before:
        pass
    server.shutdown()
    server.server_close()


def _listeners(port: int) -> int:
    """Sockets of this machine that listen on the port."""
    n = 0
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with suppress(OSError, ValueError):
            for line in Path(table).read_text().splitlines()[1:]:
                _, local, _, state = line.split()[:4]
                n += state == _LISTENS and int(local.rpartition(":")[2], 16) == port
    return n
