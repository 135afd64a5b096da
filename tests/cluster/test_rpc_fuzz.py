"""The fuzzers' corpus (tests/native/fuzz/corpus) against the real server: it survives and serves the next client."""

from __future__ import annotations

import re
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from random import Random

import pytest

from support import marked_operators, rpc_wire
from support.paths import NATIVE, ROOT
from support.processes import ran
from support.rpc_wire import Server, is_served, receive
from support.sanitizers import skip_without

CORPUS = NATIVE / "fuzz" / "corpus"
COMMANDS = sorted((CORPUS / "commands").iterdir())
HANDSHAKES = sorted((CORPUS / "handshake").iterdir())
TENSOR = len(rpc_wire.tensor(0, 0, (1,)))
# Seeds that are refused on purpose; all others are what real clients send.
REFUSED = {"function", "recompute_after_free", "get_after_free", "mul_mat_id_own_no_experts"}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server("--isolate") as running:
        yield running


def messages(data: bytes) -> Iterator[tuple[int, bytes]]:
    while len(data) >= 9:
        (size,) = struct.unpack_from("<Q", data, 1)
        yield data[0], data[9 : 9 + size]
        data = data[9 + size :]


def tensors_of(command: int, body: bytes) -> range:
    """Offsets of the tensors in a message, as tests/native/fuzz/fuzz_commands.cpp finds them."""
    first = {rpc_wire.GET_ALLOC_SIZE: 4}.get(command, 0)
    if command == rpc_wire.GRAPH_COMPUTE and len(body) >= 8:
        first = 12 + 8 * struct.unpack_from("<I", body, 4)[0]
        return range(first, len(body) - TENSOR + 1, TENSOR)
    single = (rpc_wire.SET_TENSOR, rpc_wire.SET_TENSOR_HASH, rpc_wire.GET_TENSOR, rpc_wire.INIT_TENSOR)
    n = {rpc_wire.COPY_TENSOR: 2, rpc_wire.GET_ALLOC_SIZE: 11, rpc_wire.MEMSET_TENSOR: 1}.get(command, 0)
    n = 1 if command in single else n
    return range(first, min(first + n * TENSOR, len(body) - TENSOR + 1), TENSOR)


def sent(connection: socket.socket, data: bytes, change: Callable[[bytes], bytes] = bytes) -> None:
    """Send what the input stands for, names of buffers replaced by what the server gave them; `change` comes last."""
    buffers: list[tuple[int, int]] = []
    for command, body in messages(data):
        changed = bytearray(body)
        if command in (rpc_wire.BUFFER_GET_BASE, rpc_wire.FREE_BUFFER, rpc_wire.BUFFER_CLEAR):
            (name,) = struct.unpack_from("<Q", changed)
            if 0 < name <= len(buffers):
                struct.pack_into("<Q", changed, 0, buffers[name - 1][0])
        for at in tensors_of(command, body):
            (name,) = struct.unpack_from("<Q", changed, at + 12)
            if 0 < name <= len(buffers):
                pointer, base = buffers[name - 1]
                data_at = at + TENSOR - 4 - 64 - 8
                (offset,) = struct.unpack_from("<Q", changed, data_at)
                struct.pack_into("<Q", changed, at + 12, pointer)
                struct.pack_into("<Q", changed, data_at, (base + offset) % 2**64)
        if command == rpc_wire.ALLOC_BUFFER:
            made = rpc_wire.ask(connection, command, bytes(changed))
            if len(made) == 16 and made[:8] != bytes(8):
                got = rpc_wire.ask(connection, rpc_wire.BUFFER_GET_BASE, made[:8])
                if len(got) < 8:
                    return
                buffers.append((struct.unpack_from("<Q", made)[0], struct.unpack_from("<Q", got)[0]))
            continue
        connection.sendall(change(rpc_wire.message(command, bytes(changed))))
        if command in ANSWERED:
            head = receive(connection, 8)
            receive(connection, struct.unpack("<Q", head)[0] if len(head) == 8 else 0)


def replay(server: Server, data: bytes) -> bool:
    """Whether the server still answers this client at the end of the input."""
    with server.connect() as connection:
        assert is_served(connection)
        try:
            sent(connection, data)
        except OSError:
            return False
        return len(rpc_wire.ask(connection, rpc_wire.GET_ALIGNMENT, bytes(4))) == 8


ANSWERED = {
    rpc_wire.GET_ALIGNMENT,
    rpc_wire.GET_MAX_SIZE,
    rpc_wire.BUFFER_GET_BASE,
    rpc_wire.SET_TENSOR_HASH,
    rpc_wire.GET_TENSOR,
    rpc_wire.COPY_TENSOR,
    rpc_wire.GET_DEVICE_MEMORY,
    rpc_wire.GET_ALLOC_SIZE,
    rpc_wire.DEVICE_COUNT,
}


@pytest.mark.slow
@pytest.mark.parametrize("path", COMMANDS, ids=lambda p: p.name)
def test_commands(server: Server, path: Path) -> None:
    lives = replay(server, path.read_bytes())
    if not path.name.startswith("found"):
        assert lives == (path.name not in REFUSED)
    with server.connect() as following:
        assert is_served(following)


@pytest.mark.slow
def test_handshakes(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_bytes(bytes(range(65, 97)))
    token.chmod(0o600)
    with Server(env={"OALLAMA_RPC_TOKEN_FILE": str(token)}) as guarded:
        for path in HANDSHAKES:
            with guarded.connect() as connection:
                connection.sendall(path.read_bytes()[1:])
        end, said = time.monotonic() + 10, -1
        while (
            said != rpc_wire.WELCOME and time.monotonic() < end
        ):  # so many wrong answers keep this address out for 4 s
            with guarded.connect() as connection:
                said = rpc_wire.shake(connection, token.read_bytes())
                assert said in (-1, rpc_wire.WELCOME)
                assert said == -1 or is_served(connection)
            time.sleep(0.2)
        assert said == rpc_wire.WELCOME


def mutated(message: bytes, random: Random) -> bytes:
    """One message in four: with other bytes or another length, twice, or a part of it."""
    if random.random() < 0.75:
        return message
    changed = bytearray(message)
    for _ in range(random.randrange(4)):
        changed[random.randrange(len(changed))] = random.choice((0, 1, 0x7F, 0x80, 0xFF, random.randrange(256)))
    if random.random() < 0.2:
        at = random.randrange(max(1, len(changed) - 8))
        changed[at : at + 8] = struct.pack("<Q", random.choice((0, 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1)))
    if random.random() < 0.1:
        del changed[random.randrange(len(changed)) :]
    return bytes(changed) * random.choice((1, 1, 1, 2))


@pytest.mark.slow
def test_mutations_after_a_right_handshake(tmp_path: Path) -> None:
    """The server ends each client's connection by itself when the client has no more to say, and serves the next."""
    token = tmp_path / "token"
    token.write_bytes(bytes(range(65, 97)))
    token.chmod(0o600)
    random = Random(26)
    with Server(env={"OALLAMA_RPC_TOKEN_FILE": str(token)}) as guarded:
        for _ in range(200):
            with guarded.connect(timeout=60) as connection:
                assert rpc_wire.shake(connection, token.read_bytes(), patient=True) == rpc_wire.WELCOME
                assert is_served(connection)
                connection.settimeout(1)  # a message that is longer than it says is waited for
                with suppress(OSError):
                    sent(connection, random.choice(COMMANDS).read_bytes(), lambda each: mutated(each, random))
                connection.settimeout(60)
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_WR)
                with suppress(ConnectionError):
                    while connection.recv(1 << 16):
                        pass
        log = guarded.log()
    assert not re.search(r"signal (4|7|8|11)\b", log), log[-2000:]


@pytest.mark.slow
def test_marked_operators_stay_within_their_tensors(tmp_path: Path) -> None:
    """Under ASan and UBSan: right ones, and ones with odd shapes, strides, types, views and experts."""
    skip_without("address")
    for number, data in enumerate(marked_operators.messages(3000)):
        (tmp_path / str(number)).write_bytes(data)
    ran(ROOT / "scripts" / "fuzz.sh", "0", "commands", tmp_path, timeout=1800)


@pytest.mark.slow
def test_marked_operators_do_not_end_the_server(server: Server) -> None:
    """About a third are computed; the others are refused, and none ends the worker by a signal of the machine."""
    lives = [replay(server, data) for data in marked_operators.messages(300)]
    assert 60 < sum(lives) < 240
    log = server.log()
    assert not re.search(r"signal (4|7|8|11)\b", log), log[-2000:]


def test_the_corpus_is_what_its_script_writes(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "support.fuzz_corpus", tmp_path], cwd=ROOT / "tests", check=True)
    for target in ("commands", "handshake"):
        made = {p.name: p.read_bytes() for p in (tmp_path / target).iterdir()}
        for name, data in made.items():
            kept = (CORPUS / target / name).read_bytes()
            assert len(kept) == len(data) if target == "handshake" else kept == data  # answers have random numbers
