"""RPC servers: who gets in, from where, when a lost peer is noticed, and that no client harms the next."""

from __future__ import annotations

import os
import re
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from random import Random
from subprocess import PIPE

import pytest

from oallama.engine import runtime
from oallama.netlab import NetLab
from support import rpc_wire
from support.lab import needs_lab
from support.processes import is_running, ran_python, until
from support.rpc_wire import BUSY, KNOW_IF_BUSY, QUEUED, REFUSED, WELCOME, Server, is_served, message, receive, shake

TOKEN = b"a token of twenty-eight bytes"
ADD = "import sys; from oallama.engine import native; print(native.core().add_rpc_server(sys.argv[1]))"
HELLO = """
import sys
from oallama.engine import native
try:
    native.core().rpc_hello(sys.argv[1], float(sys.argv[2]))
except RuntimeError as error:
    print(error)
"""


@pytest.fixture()
def token_file(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_bytes(TOKEN + b"\n")
    path.chmod(0o600)
    return path


@pytest.fixture()
def server(token_file: Path) -> Iterator[Server]:
    with Server(env={"OALLAMA_RPC_TOKEN_FILE": str(token_file)}) as running:
        yield running


def hello(endpoint: str, timeout: float = 5.0, **env: str) -> str:
    """What `rpc_hello` says in a process of its own; empty when all is well."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("OALLAMA_RPC_")}
    command = [sys.executable, "-c", HELLO, endpoint, str(timeout)]
    done = subprocess.run(command, env=clean | env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def refusal(*options: str, **env: str) -> tuple[int, str]:
    with Server(*options, env=env, wait=False) as refusing:
        code = refusing.process.wait(timeout=20)
        return code, refusing.log()


# ---- who gets in ----------------------------------------------------------------------------------------------------


def test_with_the_token_a_client_is_served(server: Server, token_file: Path) -> None:
    with server.connect() as connection:
        assert shake(connection, TOKEN) == WELCOME
        assert is_served(connection)
    assert hello(server.endpoint, OALLAMA_RPC_TOKEN_FILE=str(token_file)) == ""


def test_wrong_token(server: Server, tmp_path: Path) -> None:
    with server.connect() as connection:
        assert shake(connection, b"another token, long enough") == REFUSED
        assert receive(connection, 1) == b""  # and closed
    other = tmp_path / "other"
    other.write_text("another token, long enough")
    other.chmod(0o600)
    assert "does not accept the token" in hello(server.endpoint, OALLAMA_RPC_TOKEN_FILE=str(other))


def test_no_token(server: Server) -> None:
    with server.connect() as connection:
        connection.sendall(message(rpc_wire.HELLO, bytes(24)))
        assert receive(connection, 8) == rpc_wire.MAGIC  # no length an upstream client takes
        assert receive(connection, 100)[32:] in (b"", bytes([REFUSED]) + bytes(39))
    assert "wants a token" in hello(server.endpoint)


def test_a_token_where_none_is_asked_for(token_file: Path) -> None:
    with Server() as open_server:
        said = hello(open_server.endpoint, 2.0, OALLAMA_RPC_TOKEN_FILE=str(token_file))
        assert "asks for no token" in said
        env = {"OALLAMA_RPC_TOKEN_FILE": str(token_file), "OALLAMA_RPC_NO_TOKEN": f"x:1,{open_server.endpoint}"}
        assert hello(open_server.endpoint, **env) == ""


def test_an_old_answer_does_not_open_again(server: Server) -> None:
    with server.connect() as connection:
        challenge = receive(connection, 40)
        given = rpc_wire.answer(challenge, TOKEN)
        connection.sendall(given)
        assert rpc_wire.verdict(connection, TOKEN, challenge, given) == WELCOME
    with server.connect() as connection:
        assert receive(connection, 40) != challenge
        connection.sendall(given)
        assert receive(connection, 40)[:1] == bytes([REFUSED])


def test_a_server_that_does_not_know_the_token_is_not_trusted(token_file: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def impostor() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.sendall(rpc_wire.MAGIC + bytes(32))
                receive(connection, 80)
                connection.sendall(bytes([WELCOME]) + bytes(39))

        thread = threading.Thread(target=impostor)
        thread.start()
        endpoint = f"127.0.0.1:{listening.getsockname()[1]}"
        assert "does not know the token" in hello(endpoint, OALLAMA_RPC_TOKEN_FILE=str(token_file))
        thread.join()


def test_messages_of_the_preflight() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        endpoint = f"127.0.0.1:{listening.getsockname()[1]}"
        assert "no answer in time" in hello(endpoint, 0.5)

        def other_version() -> None:
            listening.accept()[0].close()  # the connection above
            connection, _ = listening.accept()
            with connection:
                receive(connection, 33)
                connection.sendall(struct.pack("<Q", 28) + b"\x03\x01" + bytes(26))

        thread = threading.Thread(target=other_version)
        thread.start()
        assert "speaks version 3.1.0" in hello(endpoint)
        thread.join()
    assert "Connection refused" in hello(endpoint)
    assert "expected host:port" in hello("nonsense")
    assert "expected host:port" in hello("127.0.0.1:99999")


def test_a_program_without_preflight_ends_with_one_line(server: Server) -> None:
    environment = os.environ | {"OALLAMA_RPC_TOKEN_FILE": "/nowhere"}
    command = [sys.executable, "-c", ADD, server.endpoint]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "the token file /nowhere cannot be read" in done.stderr and "backtrace" not in done.stderr


@pytest.mark.parametrize("size", [16, 63, 64, 65, 131, 4096])  # of one and of several SHA-256 blocks
def test_tokens_of_all_sizes(size: int, tmp_path: Path) -> None:
    token = bytes(33 + i % 90 for i in range(size))
    path = tmp_path / "token"
    path.write_bytes(token)
    path.chmod(0o600)
    with Server(env={"OALLAMA_RPC_TOKEN_FILE": str(path)}) as running, running.connect() as connection:
        assert shake(connection, token) == WELCOME
        assert is_served(connection)


# ---- those who try --------------------------------------------------------------------------------------------------


def test_failed_attempts_are_answered_later_and_later(server: Server) -> None:
    took = []
    for _ in range(4):
        start = time.monotonic()
        with server.connect() as connection:
            assert shake(connection, b"wrong, wrong, wrong") == REFUSED
        took.append(time.monotonic() - start)
    announced = [float(each) for each in re.findall(r"answered in ([0-9.]+) s", server.log())]
    assert announced == [0.25, 0.5, 1.0, 2.0]
    assert all(seconds >= least for seconds, least in zip(took, announced, strict=True))
    with server.connect() as guesser, server.connect() as connection:  # who knows the token does not wait for others
        challenge = receive(guesser, 40)
        guesser.sendall(rpc_wire.answer(challenge, b"wrong, wrong, wrong"))  # to be answered in 4 s
        assert shake(connection, TOKEN) == WELCOME
        assert not select.select([guesser], [], [], 0)[0]


def test_guessing_in_parallel_is_limited(server: Server) -> None:
    """More connections than an address may have at the door: the rest is turned away without an answer."""
    connections = [server.connect() for _ in range(40)]
    for connection in connections:
        challenge = receive(connection, 40)
        with suppress(OSError):
            if len(challenge) == 40:
                connection.sendall(rpc_wire.answer(challenge, b"wrong, wrong, wrong"))
        # Those who have not answered make room for others; the eight who answered wrongly keep their places.
    answered = server.log().count("wrong token")
    for connection in connections:
        connection.close()
    assert answered <= 16


def test_peers_that_say_nothing_keep_nobody_out(server: Server) -> None:
    silent = [server.connect() for _ in range(100)]
    slow = server.connect()
    receive(slow, 40)
    start = time.monotonic()
    with server.connect() as connection:
        assert shake(connection, TOKEN) == WELCOME
        assert is_served(connection)
    assert time.monotonic() - start < 2.0
    with pytest.raises(OSError):
        for _ in range(40):  # one byte every 0.2 s: not for longer than the handshake may take
            slow.sendall(rpc_wire.MAGIC[:1] if _ == 0 else rpc_wire.MAGIC[_ % 8 : _ % 8 + 1])
            time.sleep(0.2)
    for connection in silent:
        connection.close()


def test_without_a_token_peers_that_say_nothing_keep_nobody_out() -> None:
    with Server("--isolate") as running:
        hello, lengths = message(rpc_wire.HELLO, bytes(24)), Random(1)
        silent = [running.connect() for _ in range(100)]
        for connection in silent[90:]:
            with suppress(OSError):
                connection.sendall(hello[: lengths.randrange(1, len(hello))])  # and no more of it
        start = time.monotonic()
        with running.connect() as connection:
            assert is_served(connection)
        assert time.monotonic() - start < 2.0
        assert receive(silent[-1], 1) == b""  # given up after some seconds
        for connection in silent:
            connection.close()
        with running.connect() as connection:  # who says it slowly is served
            for part in (hello[:1], hello[1:9], hello[9:20], hello[20:]):
                connection.sendall(part)
                time.sleep(0.1)
            assert len(receive(connection, 36)) == 36
        with running.connect() as connection:  # who says something else is not
            connection.sendall(message(rpc_wire.DEVICE_COUNT))
            assert receive(connection, 1) == b""


# ---- from where -----------------------------------------------------------------------------------------------------


def test_other_addresses_need_listen_and_a_token(token_file: Path, tmp_path: Path) -> None:
    code, said = refusal("--host", "0.0.0.0")
    assert code == 2 and "--listen 0.0.0.0" in said and said.count("\n") == 1
    code, said = refusal("-H", "192.0.2.1", OALLAMA_RPC_TOKEN_FILE=str(token_file))
    assert code == 2 and "not loopback" in said
    code, said = refusal("--listen", "0.0.0.0")
    assert code == 2 and "needs a token" in said and said.count("\n") == 1
    code, said = refusal("--listen")
    assert code == 2 and "expected an address" in said
    with Server("--listen", "0.0.0.0", env={"OALLAMA_RPC_TOKEN_FILE": str(token_file)}) as open_server:
        with open_server.connect() as connection:
            assert shake(connection, TOKEN) == WELCOME
        assert "listening on 0.0.0.0" in open_server.log() and "WARNING" not in open_server.log()
    for host in ("127.0.0.1", "127.0.0.2"):
        with Server("--host", host, wait=False) as local:
            time.sleep(1.5)
            assert local.process.poll() is None, local.log()


@pytest.mark.parametrize(
    ("content", "mode", "said"),
    [
        (TOKEN, 0o640, "chmod 600"),
        (TOKEN, 0o604, "chmod 600"),
        (b"too short\n\n\n\n\n\n\n\n\n\n", 0o600, "has 9 bytes"),
        (b"", 0o600, "has 0 bytes"),
        (b"x" * 5000, 0o600, "at most 4096"),
        (None, 0, "No such file"),
    ],
)
def test_token_files(content: bytes | None, mode: int, said: str, tmp_path: Path) -> None:
    path = tmp_path / "token"
    if content is not None:
        path.write_bytes(content)
        path.chmod(mode)
    code, words = refusal(OALLAMA_RPC_TOKEN_FILE=str(path))
    assert code == 2 and said in words and words.count("\n") == 1
    assert said in hello("127.0.0.1:1", OALLAMA_RPC_TOKEN_FILE=str(path))


def test_an_occupied_port_and_an_unknown_device_end_the_server() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        code, said = refusal("-p", str(taken.getsockname()[1]), "--isolate")
        assert code == 2 and "cannot listen" in said
    code, said = refusal("--isolate", "-d", "NoSuchDevice")
    assert code == 1 and "unknown device" in said


# ---- one after another ----------------------------------------------------------------------------------------------


def test_a_second_client_is_told_that_the_server_is_busy(server: Server, token_file: Path) -> None:
    with server.connect() as first:
        assert shake(first, TOKEN) == WELCOME
        assert is_served(first)
        assert "busy with another client" in hello(server.endpoint, OALLAMA_RPC_TOKEN_FILE=str(token_file))
        with server.connect() as second:  # one that said nothing while that program starts may be let go
            assert shake(second, TOKEN, KNOW_IF_BUSY) == BUSY
        assert is_served(first) is False  # a second hello is none of the protocol: the server hangs up
    with server.connect() as third:
        assert shake(third, TOKEN) == WELCOME
        assert is_served(third)


def test_who_waits_is_told_and_served_later(server: Server) -> None:
    first, second = server.connect(), server.connect()
    assert shake(first, TOKEN) == WELCOME
    challenge = receive(second, 40)
    given = rpc_wire.answer(challenge, TOKEN)
    second.sendall(given)
    assert rpc_wire.verdict(second, TOKEN, challenge, given) == QUEUED
    first.close()
    assert rpc_wire.verdict(second, TOKEN, challenge, given) == WELCOME
    assert is_served(second)
    second.close()


def test_memory_is_given_back_after_a_client_that_was_killed_within_a_message() -> None:
    with Server("--isolate") as running:
        before, (worker,) = running.memory(), running.workers()
        connection = running.connect()
        assert is_served(connection)
        buffer, base = rpc_wire.allocate(connection, 256 << 20)
        connection.sendall(message(rpc_wire.BUFFER_CLEAR, struct.pack("<QB", buffer, 7)))
        rpc_wire.ask(connection, rpc_wire.GET_ALIGNMENT, bytes(4))
        assert running.memory() > before + (200 << 20)
        header = rpc_wire.tensor(1, rpc_wire.F32, (1 << 20,), buffer, base)
        connection.sendall(message(rpc_wire.SET_TENSOR, header, size=len(header) + 9 + (4 << 20)))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()  # a reset, as from a client that was killed with data on its way
        with running.connect() as next_client:
            assert is_served(next_client)
        assert running.workers() != [worker]
        assert running.memory() < before + (50 << 20)


def test_a_worker_that_breaks_does_not_break_the_server() -> None:
    with Server("--isolate") as running:
        with running.connect() as connection:
            assert is_served(connection)
            os.kill(running.workers()[0], signal.SIGSEGV)
            assert receive(connection, 1) == b""
        with running.connect() as connection:
            assert is_served(connection)
        assert "ended by signal 11" in running.log()


def test_workers_end_with_their_supervisor() -> None:
    with Server("--isolate") as running:
        (worker,) = running.workers()
    until(lambda: not is_running(worker), 5)


def test_a_client_without_preflight_waits_for_its_turn(server: Server, token_file: Path) -> None:
    environment = os.environ | {"OALLAMA_RPC_TOKEN_FILE": str(token_file)}
    with server.connect() as first:
        assert shake(first, TOKEN) == WELCOME
        command, pipes = [sys.executable, "-c", ADD, server.endpoint], {"stdout": PIPE, "stderr": PIPE}
        waiting = subprocess.Popen(command, env=environment, text=True, **pipes)
        assert waiting.stderr
        assert any("is busy with another client: waiting" in line for line in iter(waiting.stderr.readline, ""))
    said, _ = waiting.communicate(timeout=30)
    assert waiting.returncode == 0 and said == "['RPC0']\n"


# ---- the cache of weights -------------------------------------------------------------------------------------------

LOGITS = """
import sys
from oallama.engine import device_list, runtime
device_list.add_rpc_server(sys.argv[1])
llm = runtime.llama_cpp().Llama(sys.argv[2], n_gpu_layers=-1, n_ctx=64, verbose=False, use_mmap=False)
llm.eval(list(range(300, 332)))
print(llm._ctx.get_logits_ith(-1)[:200])
"""


def test_small_weights_come_from_the_cache_whole_or_not_at_all(tiny: Callable[..., Path], tmp_path: Path) -> None:
    env = {"LLAMA_CACHE": str(tmp_path), "GGML_RPC_DEBUG": "1"}
    with Server("--isolate", "-c", env=env) as running:

        def logits(**variables: str) -> str:
            return ran_python(LOGITS, running.endpoint, tiny("llama"), env=variables).stdout

        expected = logits()
        files = tmp_path / "rpc"
        assert list(files.iterdir()) == []  # nothing is larger than upstream's 10 MiB
        assert logits(OALLAMA_RPC_HASH_BYTES="1000") == expected
        kept = sorted(files.iterdir())
        assert len(kept) > 5 and not [path for path in kept if path.suffix == ".part"]
        times = [path.stat().st_mtime_ns for path in kept]
        assert logits(OALLAMA_RPC_HASH_BYTES="1000") == expected
        assert [path.stat().st_mtime_ns for path in kept] == times  # not sent again
        whole = kept[0].read_bytes()
        kept[0].write_bytes(whole[:-1])
        assert logits(OALLAMA_RPC_HASH_BYTES="1000") == expected
        assert kept[0].read_bytes() == whole


# ---- a cut cable ----------------------------------------------------------------------------------------------------

GENERATE = """
import sys
from oallama.engine import device_list, runtime
device_list.add_rpc_server(sys.argv[1])
llm = runtime.llama_cpp().Llama(sys.argv[2], n_gpu_layers=-1, n_ctx=256, verbose=False)
while True:
    llm.reset()
    llm.eval(list(range(300, 364)))
    print("ready", flush=True)
"""


@needs_lab
def test_a_cut_cable_ends_the_client_and_frees_the_server(
    token_file: Path, tiny: Callable[..., Path], tmp_path: Path
) -> None:
    timeout = 4
    env = {**os.environ, "OALLAMA_RPC_TOKEN_FILE": str(token_file), "OALLAMA_RPC_TIMEOUT": str(timeout)}
    with NetLab(2) as lab, (tmp_path / "log").open("w") as log:
        program = str(runtime.program("ggml-rpc-server"))
        command = [program, "--listen", lab.address(1), "-p", "50052", "-d", "CPU", "-t", "1"]
        server = lab.popen(1, command, env=env, stdout=log, stderr=log)
        endpoint = f"{lab.address(1)}:50052"
        generate = [sys.executable, "-c", GENERATE, endpoint, str(tiny("llama"))]
        say_hello = [sys.executable, "-c", HELLO, endpoint, "15"]
        for _ in range(100):
            if not lab.run(0, say_hello, env=env, stdout=subprocess.PIPE).stdout:
                break
            time.sleep(0.1)
        client = lab.popen(0, generate, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        assert client.stdout.readline() == b"ready\n", (tmp_path / "log").read_text()
        assert b"busy" in lab.run(0, say_hello, env=env, stdout=subprocess.PIPE).stdout
        lab.cut(1)
        start = time.monotonic()
        client.wait(timeout=60)
        assert timeout - 1 < time.monotonic() - start < timeout + 3  # on a busy machine
        assert client.returncode != 0
        time.sleep(max(0.0, timeout + 2 - (time.monotonic() - start)))  # the server's side has noticed, too
        lab.mend(1)
        assert lab.run(0, say_hello, env=env, stdout=subprocess.PIPE).stdout == b""
        server.kill()
