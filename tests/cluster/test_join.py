"""Hosts that join by a token: `oallama cluster join` there; `add`, `plan` and `run --hosts` here."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

pytest.importorskip("asyncssh", reason="needs asyncssh: pip install 'oallama[cluster]'")
if not shutil.which("ssh"):
    pytest.skip("needs ssh: apt-get install openssh-client", allow_module_level=True)

from oallama.cluster.join import keys, known
from oallama.cluster.join.token import Token, library
from oallama.errors import OallamaError
from support.cli import oallama
from support.clusters import PROMPT, expected, port_pair, shown
from support.listening import beyond_loopback, descendants, listening
from support.processes import process_of, until
from support.servers import OALLAMA

LAYERS = "layers on beta"
SMALL = {"OALLAMA_HOST_MEMORY": str(4 << 20)}  # of this host: too little for the model


@dataclass(frozen=True)
class Joined:
    """A host that has joined: where it waits, its token, its process."""

    address: str
    token: str
    process: subprocess.Popen[str]

    @property
    def port(self) -> int:
        return int(self.address.partition(":")[2])

    def heard(self, text: str) -> None:
        """Wait until it has said so."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            if text in line:
                return
        raise AssertionError(f"it has ended and never said {text!r}")


def join_port() -> int:
    """A port that is free, as the next ones are."""
    while True:
        port = port_pair() - 1
        with suppress(OSError), socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
            return port


@contextmanager
def joined(folder: Path, *more: str, port: int | None = None, **variables: str) -> Iterator[Joined]:
    """`oallama cluster join` on this host, with its keys in `folder`. variables: of its environment."""
    command = [OALLAMA, "cluster", "join", "--listen", "127.0.0.1", "--port", str(port or join_port()), *more]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with process_of(command, env=os.environ | {"XDG_CONFIG_HOME": str(folder), **variables}, **pipes) as process:
        assert process.stdout is not None and process.stderr is not None
        words = process.stdout.readline().split()
        assert words[:3] == ["oallama", "cluster", "add"], process.stderr.read()
        yield Joined(words[4], words[5], process)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for what this host knows of others."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "here"))
    return tmp_path


def ssh(host: known.KnownHost, *more: str, options: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
    command = ["ssh", "-o", "BatchMode=yes", *host.entry().ssh_options, *options, host.address, *more]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL)


# ---- tokens and what is written down ---------------------------------------------------------------------------------


def test_a_token_is_read_back_and_a_damaged_one_is_refused() -> None:
    token = Token.new(os.urandom(32))
    text = str(token)
    assert Token.parse(f" {text}\n") == token and text not in repr(token)
    wrong = [text[:at] + ("A" if text[at] != "A" else "B") + text[at + 1 :] for at in range(len(text) - 1)]
    for damaged in [*wrong, "", text[:-1], text + "AAAA", text.replace(text[5], "é"), "a token"]:
        with pytest.raises(OallamaError, match="this is no token"):
            Token.parse(damaged)


def test_no_token_looks_like_an_option() -> None:
    for first in range(256):
        assert str(Token(bytes([first]) * 32, bytes(32)))[0].isalnum()


def test_a_host_keeps_its_token_until_it_makes_a_new_one(here: Path) -> None:
    first = keys.own_keys()
    assert keys.own_keys() == first
    other = keys.own_keys(new_token=True)
    assert other.host_key == first.host_key and other.token.host_key == first.token.host_key
    assert other.token.client_key != first.token.client_key and keys.own_keys() == other
    (file,) = (here / "here").rglob("join.json")
    assert file.stat().st_mode & 0o777 == 0o600 and file.parent.stat().st_mode & 0o777 == 0o700
    file.write_text('{"host_key": "xyz"}')
    with pytest.raises(OallamaError, match="is damaged; remove it"):
        keys.own_keys()


@pytest.mark.parametrize("name", ["client", "local", "-x", "a/b", "", ".a", "a,b", "n" * 64])
def test_names_that_hosts_cannot_have(name: str, here: Path) -> None:
    with pytest.raises(OallamaError, match="no name for a host"):
        known.write_down(name, ("10.0.0.2", 50051), Token.new(os.urandom(32)))


@pytest.mark.parametrize("text", ["", "beta", "10.0.0.2:", "10.0.0.2:0", "10.0.0.2:65535", "0.0.0.0", "10.0.0.2:a:1"])
def test_addresses_that_hosts_cannot_have(text: str) -> None:
    assert known.parse_address("10.0.0.2") == ("10.0.0.2", known.DEFAULT_PORT)
    with pytest.raises(OallamaError, match="no address of a host"):
        known.parse_address(text)


def test_a_host_is_known_by_one_name(here: Path) -> None:
    token, address = Token.new(os.urandom(32)), ("10.0.0.2", 50051)
    host = known.write_down("beta", address, token)
    assert not known.known_hosts()  # nobody has tried it
    known.keep(host)
    (found,) = known.known_hosts()
    assert (found.name, found.address, found.port) == ("beta", *address)
    assert (found.folder / "key").stat().st_mode & 0o777 == 0o600
    with pytest.raises(OallamaError, match="known as beta; run `oallama cluster hosts --remove beta`"):
        known.write_down("gamma", address, token)
    known.keep(known.write_down("beta", ("10.0.0.3", 50051), token))  # it has moved
    assert [each.address for each in known.named(["beta"])] == ["10.0.0.3"]
    for twice in (["beta", "beta"], ["10.0.0.4:50052", "beta", "10.0.0.4:50052"]):
        with pytest.raises(OallamaError, match=f"host {twice[0]} is named twice"):
            known.entries_of(twice)
    with pytest.raises(OallamaError, match=r"no host 'gamma' is known \(beta\)"):
        known.named(["beta", "gamma"])
    known.remove("beta")
    assert not known.known_hosts()


def test_without_asyncssh_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    token = Token.new(os.urandom(32))
    for name, needs_it in (("cryptography", token.host_public), ("asyncssh", lambda: library("asyncssh"))):
        with monkeypatch.context() as without:
            for module in [m for m in sys.modules if m.partition(".")[0] == name]:
                without.setitem(sys.modules, module, None)
            with pytest.raises(OallamaError, match="hosts that join need asyncssh: pip install"):
                needs_it()


# ---- a host that has joined ------------------------------------------------------------------------------------------


def test_a_joined_host_computes(tiny: Callable[..., Path], here: Path) -> None:
    """From the token to the answer, as a user would: this host has too little memory for the model."""
    model = tiny("llama")
    with joined(here, "--memory", "1GiB", "--threads", "1") as beta:
        done = oallama("cluster", "add", "beta", beta.address, beta.token)
        assert done.returncode == 0 and "beta lends 1.0 GiB" in done.stderr, done.stderr
        beta.heard("has left")
        done = oallama("cluster", "hosts")
        assert beta.address in done.stdout and "beta" in done.stdout
        more = ["--hosts", "beta", "--temperature", "0", "--n-generate", "16", "--ctx", "1024"]
        done = oallama("cluster", "run", model, PROMPT, *more, env=os.environ | SMALL)
        assert done.returncode == 0 and LAYERS in done.stderr, done.stderr
        assert done.stdout.startswith(shown(model, expected(model, 1)))  # beta may have other kernels: near ties part
        # Neither a client that is gone nor the host itself can be reached from elsewhere.
        seen = listening(descendants(beta.process.pid))
        assert ("tcp", "127.0.0.1", beta.port) in seen and not beyond_loopback(seen)


def test_the_token_is_asked_for(here: Path) -> None:
    with joined(here) as beta:
        done = oallama("cluster", "add", "beta", beta.address, stdin=beta.token + "\n")
        assert done.returncode == 0 and [host.name for host in known.known_hosts()] == ["beta"], done.stderr


def test_old_and_wrong_tokens_are_refused(here: Path) -> None:
    with joined(here) as beta:
        assert oallama("cluster", "add", "beta", beta.address, beta.token).returncode == 0
    with joined(here, "--new-token", port=beta.port) as again:
        done = oallama("cluster", "probe", "--hosts", "beta")
        assert done.returncode == 2 and "Permission denied" in done.stderr
        assert "its token is wrong or old: add the host again" in done.stderr
        other = Token.new(os.urandom(32))
        done = oallama("cluster", "add", "gamma", again.address, str(other))
        assert done.returncode == 2 and "Host key verification failed; its token is wrong or old" in done.stderr
        assert [host.name for host in known.known_hosts()] == ["beta"]
        assert oallama("cluster", "add", "beta", again.address, again.token).returncode == 0


def test_the_token_opens_nothing_but_the_agent(here: Path) -> None:
    with joined(here) as beta:
        known.keep(host := known.write_down("beta", ("127.0.0.1", beta.port), Token.parse(beta.token)))
        (host,) = known.known_hosts()
        for command in (["id"], ["python", "-m", "http.server"], ["sh", "-c", "id"], []):
            done = ssh(host, *command)
            assert done.returncode == 1 and not done.stdout, done
            assert "this host runs oallama's agent alone" in done.stderr
        assert "request failed" in ssh(host, "sftp", options=["-s"]).stderr
        assert "PTY allocation request failed" in ssh(host, "id", options=["-tt"]).stderr
        listens = ["-o", "ExitOnForwardFailure=yes", "-N", "-R", "0:127.0.0.1:22"]
        assert ssh(host, options=listens).returncode == 255
        # To another port than those of the RPC server and of the echo.
        assert "open failed" in ssh(host, options=["-W", f"127.0.0.1:{beta.port}"]).stderr
        assert "open failed" in ssh(host, options=["-W", f"127.0.0.2:{known.rpc_port(beta.port)}"]).stderr


def test_silent_peers_keep_nobody_out(here: Path) -> None:
    """They are let go after five seconds, and the oldest of many at once."""
    with joined(here) as beta, ExitStack() as stack:
        silent = [stack.enter_context(socket.create_connection(("127.0.0.1", beta.port))) for _ in range(100)]
        assert oallama("cluster", "add", "beta", beta.address, beta.token).returncode == 0
        for peer in silent:
            peer.settimeout(30)
            while peer.recv(1000):  # the greeting, then the end
                pass


def test_one_client_at_a_time(here: Path) -> None:
    with joined(here) as beta:
        assert oallama("cluster", "add", "beta", beta.address, beta.token).returncode == 0
        (host,) = known.known_hosts()
        agent = ["ssh", *host.entry().ssh_options, host.address, "python", "-m", "oallama.cluster.pipeline.agent"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        with process_of(agent, **pipes) as first:
            assert first.stdin is not None and first.stdout is not None
            first.stdin.write(json.dumps({"number": 1, "command": "hello", "device": None}) + "\n")
            first.stdin.flush()
            assert "answer" in json.loads(first.stdout.readline())
            done = oallama("cluster", "probe", "--hosts", "beta")
            assert done.returncode == 2 and "serves a client at 127.0.0.1, and one at a time" in done.stderr
        beta.heard("has left")
        beta.heard("has left")
        assert oallama("cluster", "probe", "--hosts", "beta").returncode == 0


def test_a_host_joins_once(here: Path) -> None:
    with joined(here) as beta:
        done = oallama("cluster", "join", "--listen", "127.0.0.1", "--port", str(beta.port))
        assert done.returncode == 2 and "has this host joined already?" in done.stderr


@contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """A disk of 256 KiB."""
    folder.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "none", folder], capture_output=True)
    if done.returncode:
        pytest.skip("nothing can be mounted here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def test_a_full_disk_keeps_no_weights_and_breaks_nothing(tiny: Callable[..., Path], here: Path) -> None:
    model = tiny("llama", "F16")
    with small_disk(here / "disk") as disk, joined(here, "--memory", "1GiB", XDG_CACHE_HOME=str(disk)) as beta:
        assert oallama("cluster", "add", "beta", beta.address, beta.token).returncode == 0
        more = ["--hosts", "beta", "--temperature", "0", "--n-generate", "1", "--ctx", "1024"]
        for _ in range(2):  # the second time some of the weights may be there
            done = oallama(
                "cluster", "run", model, PROMPT, *more, env=os.environ | {"OALLAMA_HOST_MEMORY": str(6 << 20)}
            )
            assert done.returncode == 0 and LAYERS in done.stderr, done.stderr
            assert done.stdout == shown(model, expected(model, 1)) + "\n"
        assert sum(file.stat().st_size for file in disk.rglob("*") if file.is_file()) <= 256 << 10
        assert not list(disk.rglob("*.part"))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_host_that_leaves_is_planned_without(number: int, tiny: Callable[..., Path], here: Path) -> None:
    """While it computes: the other goes on with the same tokens, soon."""
    model, n = tiny("llama"), 900
    with joined(here, "--memory", "1GiB", "--threads", "1") as beta, joined(here / "b", "--threads", "1") as gamma:
        for name, host in (("beta", beta), ("gamma", gamma)):
            assert oallama("cluster", "add", name, host.address, host.token).returncode == 0
            host.heard("has left")
        plan = here / "plan.json"
        more = ["--ctx", "1024", "-o", plan]
        done = oallama("cluster", "plan", model, "--hosts", "beta,gamma", *more, env=os.environ | SMALL)
        assert done.returncode == 0, done.stderr
        content = json.loads(plan.read_text())
        where = content["layers"]
        content["layers"] = ["beta"] * (len(where) // 2) + ["gamma"] * (len(where) - len(where) // 2)
        content |= {"chosen": None, "tiled": {}}
        content["context"]["attention"] = "ggml"  # the same kernels everywhere: the same tokens
        plan.write_text(json.dumps(content))
        words = [PROMPT, "--temperature", "0", "--n-generate", str(n), "--plan", plan]
        with process_of([OALLAMA, "cluster", "run", model, *words], stdout=-1, stderr=-1) as client:
            assert client.stdout is not None and client.stderr is not None
            out = client.stdout.read(1)
            beta.process.send_signal(number)
            gone, lines = time.monotonic(), []
            for line in client.stderr:
                lines.append(line)
                if "layers move" in line:
                    break
            noticed = time.monotonic() - gone
            out, said = out + client.stdout.read(), "".join(lines) + client.stderr.read()
        assert client.returncode == 0 and "beta" in said and "layers move" in said, said
        assert noticed < 5, said
        assert out == shown(model, expected(model, n)) + "\n"
        gamma.heard("has left")


def test_agents_end_with_their_host(here: Path) -> None:
    with joined(here) as beta:
        assert oallama("cluster", "add", "beta", beta.address, beta.token).returncode == 0
        (host,) = known.known_hosts()
        agent = ["ssh", *host.entry().ssh_options, host.address, "python", "-m", "oallama.cluster.pipeline.agent"]
        with process_of(agent, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as client:
            until(lambda: len(descendants(beta.process.pid)) > 1)
            started = descendants(beta.process.pid) - {beta.process.pid}
            beta.process.terminate()
            beta.process.wait(30)
            until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in started))
            client.wait(30)
