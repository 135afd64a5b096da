"""ggml's RPC protocol and our handshake, spoken by hand, and a real ggml-rpc-server to speak it to."""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import socket
import struct
import subprocess
import tempfile
from pathlib import Path
from types import TracebackType

from oallama.base.ports import free_port
from oallama.engine import runtime
from oallama.engine.rpc import die_with_parent
from support.paths import ROOT
from support.processes import until
from support.servers import is_open

MAGIC = b"OARPC\x01\r\n"
WELCOME, REFUSED, BUSY, QUEUED = range(4)
WAIT, KNOW_IF_BUSY = range(2)
(
    ALLOC_BUFFER,
    GET_ALIGNMENT,
    GET_MAX_SIZE,
    BUFFER_GET_BASE,
    FREE_BUFFER,
    BUFFER_CLEAR,
    SET_TENSOR,
    SET_TENSOR_HASH,
    GET_TENSOR,
    COPY_TENSOR,
    GRAPH_COMPUTE,
    GET_DEVICE_MEMORY,
    INIT_TENSOR,
    GET_ALLOC_SIZE,
    HELLO,
    DEVICE_COUNT,
    GRAPH_RECOMPUTE,
    MEMSET_TENSOR,
) = range(18)
F32, F16, I32 = 0, 1, 26


class Server:
    """`ggml-rpc-server` on the CPU with the given options; `port` and what it has written."""

    def __init__(self, *options: str, env: dict[str, str] | None = None, wait: bool = True) -> None:
        self.port = free_port()
        self.endpoint = f"127.0.0.1:{self.port}"
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        command = [str(runtime.program("ggml-rpc-server")), "-p", str(self.port), "-d", "CPU", "-t", "1", *options]
        clean = {k: v for k, v in os.environ.items() if not k.startswith("OALLAMA_RPC_")}
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env={**clean, **(env or {})},
            preexec_fn=die_with_parent,
        )
        if wait:
            until(lambda: self.process.poll() is not None or is_open(self.port), 20)
            assert self.process.poll() is None, self.log()

    def log(self) -> str:
        self._log.seek(0)
        return self._log.read().decode("utf-8", "replace")

    def connect(self, timeout: float = 10.0) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=timeout)

    def workers(self) -> list[int]:
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        return [int(child) for child in children.split()]

    def memory(self) -> int:
        """Resident bytes of the supervisor and its workers."""
        pages = 0
        for process in (self.process.pid, *self.workers()):
            pages += int(Path(f"/proc/{process}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    def __enter__(self) -> Server:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.kill()
        self.process.wait()
        if kind:
            print(self.log())
        self._log.close()


def receive(connection: socket.socket, size: int) -> bytes:
    """Exactly so many bytes; fewer at the end of the connection."""
    data = b""
    while len(data) < size:
        try:
            part = connection.recv(size - len(data))
        except ConnectionResetError:
            break
        if not part:
            break
        data += part
    return data


def answer(challenge: bytes, token: bytes, wish: int = WAIT) -> bytes:
    number = os.urandom(32)
    mac = hmac.new(token, b"oallama rpc client" + challenge + bytes([wish]) + number, hashlib.sha256).digest()
    return MAGIC + bytes([wish]) + bytes(7) + number + mac


def shake(connection: socket.socket, token: bytes, wish: int = WAIT, patient: bool = False) -> int:
    """The client's side of the handshake; the verdict, -1 when the connection was closed.

    patient: a place in the queue is no verdict yet.
    """
    challenge = receive(connection, 40)
    if len(challenge) < 40:
        return -1
    assert challenge[:8] == MAGIC
    given = answer(challenge, token, wish)
    connection.sendall(given)
    said = verdict(connection, token, challenge, given)
    while patient and said == QUEUED:
        said = verdict(connection, token, challenge, given)
    return said


def verdict(connection: socket.socket, token: bytes, challenge: bytes, given: bytes) -> int:
    said = receive(connection, 40)
    if len(said) < 40:
        return -1
    if said[0] != REFUSED:
        mac = hmac.new(token, b"oallama rpc server" + challenge + given + said[:1], hashlib.sha256).digest()
        assert said[8:] == mac
    return said[0]


def message(command: int, body: bytes = b"", size: int | None = None) -> bytes:
    return bytes([command]) + struct.pack("<Q", len(body) if size is None else size) + body


def ask(connection: socket.socket, command: int, body: bytes = b"") -> bytes:
    """The body of the response; empty when the server closed the connection."""
    try:
        connection.sendall(message(command, body))
    except (BrokenPipeError, ConnectionResetError):
        return b""
    head = receive(connection, 8)
    return receive(connection, struct.unpack("<Q", head)[0]) if len(head) == 8 else b""


def is_served(connection: socket.socket) -> bool:
    """Hello and the number of devices are answered."""
    return len(ask(connection, HELLO, bytes(24))) == 28 and ask(connection, DEVICE_COUNT) == b"\1\0\0\0"


def tensor(
    ident: int,
    kind: int,
    ne: tuple[int, ...],
    buffer: int = 0,
    data: int = 0,
    nb: tuple[int, ...] | None = None,
    op: int = 0,
    src: tuple[int, ...] = (),
    params: tuple[int, ...] = (),
    view: tuple[int, int] = (0, 0),
) -> bytes:
    """An rpc_tensor; strides are those of a contiguous one of 4 bytes an element unless given."""
    ne = (*ne, *[1] * (4 - len(ne)))
    if nb is None:
        size = {F16: 2}.get(kind, 4)
        nb = (size, size * ne[0], size * ne[0] * ne[1], size * ne[0] * ne[1] * ne[2])
    head = struct.pack("<QIQ4I4II", ident, kind, buffer, *(n % 2**32 for n in ne), *(n % 2**32 for n in nb), op)
    head += struct.pack("<16i", *params, *[0] * (16 - len(params))) + struct.pack("<i", 16)  # to be computed
    head += struct.pack("<10Q", *src, *[0] * (10 - len(src)))
    return head + struct.pack("<QQQ", view[0], view[1], data) + b"t".ljust(64, b"\0") + struct.pack("<i", 0)


def graph(nodes: tuple[int, ...], tensors: tuple[bytes, ...], device: int = 0) -> bytes:
    return (
        struct.pack("<II", device, len(nodes))
        + struct.pack(f"<{len(nodes)}Q", *nodes)
        + struct.pack("<I", len(tensors))
        + b"".join(tensors)
    )


def allocate(connection: socket.socket, size: int) -> tuple[int, int]:
    """A buffer of the server and its first address."""
    pointer, _ = struct.unpack("<QQ", ask(connection, ALLOC_BUFFER, struct.pack("<IQ", 0, size)))
    (base,) = struct.unpack("<Q", ask(connection, BUFFER_GET_BASE, struct.pack("<Q", pointer)))
    return pointer, base


def operators() -> dict[str, int]:
    """Names and numbers of ggml's operators, from the header of the pin."""
    header = ROOT / "third_party/llama.cpp/patched/ggml/include/ggml.h"
    body = re.search(r"enum ggml_op \{(.*?)\};", header.read_text(), re.S)[1]  # type: ignore[index]
    return {name: i for i, name in enumerate(re.findall(r"GGML_OP_(\w+)", body))}
