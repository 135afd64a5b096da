"""Starts tensor-parallel ranks on hosts: looks at them first, gives each its share of the model, runs them."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from oallama.base.children import Ended, die_with_parent, forwarded_signals
from oallama.base.environment import (
    ALLREDUCE,
    OWN_KERNELS,
    RANK_DEVICE,
    RANK_MEMORY,
    RANK_SHARING,
    RANK_SPEEDS,
    RANK_THREADS,
    RANK_TIMEOUT,
    WIRE,
)
from oallama.errors import OallamaError
from oallama.serving.door import Address
from oallama.serving.unavailable import REUSE_PORT, unavailable

from . import mpi
from .mpi import Host
from .rank import MINIMAL, OURS, RankJob, library
from .shards import check_reports, disk_floors, faster_kernels, ranks_of_host, shares

RANK_PROGRAM = "oallama.cluster.ranks.rank_process"
SSH_TIMEOUT_S = 5
PREFLIGHT_TIMEOUT_S = 300
RESTART_AFTER_S = 60
# A rank gave the others up (rank_comm.cpp), or was killed.
_FAILED = (3, 128 + signal.SIGKILL, 128 + signal.SIGSEGV, 128 + signal.SIGABRT, 128 + signal.SIGBUS)


@dataclass(frozen=True)
class RankGroup:
    """Ranks on hosts, and how they meet.

    Attributes:
        hosts: with their slots and threads; the first one runs rank 0.
        device: the ggml device that each rank computes on, by its name there.
        network: the network between the hosts as CIDR; None leaves it to MPI.
        ssh_agent: what starts a program on another host, in place of ssh.
        algorithm, wire: of the all-reduce, see docs/cluster.md.
        memory: "resident", or "minimal": weights in a file on each host, few of them in memory (CPU only).
        kernels: whose compute products and attention on CPUs: "ggml", "oallama", or "auto": by measurement (`prepare`).
        timeout_s: after which a rank that others wait for is given up (while loading: ten times that).
        variables: more of the environment for the ranks.
    """

    hosts: tuple[Host, ...]
    device: str = "CPU"
    network: str | None = None
    ssh_agent: str | None = None
    algorithm: str = "auto"
    wire: str = "native"
    memory: str = "resident"
    kernels: str = "auto"
    timeout_s: float = 60.0
    variables: dict[str, str] = field(default_factory=dict)

    @property
    def n_ranks(self) -> int:
        return sum(host.slots for host in self.hosts)

    @property
    def threads(self) -> str:
        """CPU threads of every rank, separated by commas."""
        return ",".join(str(host.n_threads) for host in self.hosts for _ in range(host.slots))

    def command(self, program: Sequence[str]) -> list[str]:
        """The mpirun command that runs `program` as every rank."""
        variables = {
            RANK_DEVICE.name: self.device,
            RANK_THREADS.name: self.threads,
            RANK_TIMEOUT.name: f"{self.timeout_s:g}",
            ALLREDUCE.name: self.algorithm,
            WIRE.name: self.wire,
            RANK_MEMORY.name: self.memory,
            OWN_KERNELS.name: "1" if self.kernels == OURS else "0",
            **self.variables,
        }
        return mpi.mpirun(self.hosts, program, variables, self.network, self.ssh_agent)


def check_hosts(group: RankGroup) -> None:
    """Raises OallamaError naming the hosts on which ssh cannot start a program within a few seconds."""
    if group.ssh_agent:
        return
    ssh = ["ssh", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={SSH_TIMEOUT_S}"]
    remote = [h.name for h in group.hosts if not h.is_local]
    tried = [(name, _start([*ssh, name, "true"])) for name in remote]
    for name, process in tried:
        _, said = process.communicate()
        if process.returncode:
            raise OallamaError(f"host {name!r} cannot be reached by ssh without a password: {said.strip()}")


def _start(command: Sequence[str]) -> subprocess.Popen[str]:
    try:
        return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    except FileNotFoundError:
        raise OallamaError(f"there is no {command[0]} here, which starts ranks on other hosts; install it") from None


def look(group: RankGroup, model: Path, sums: Sequence[int] = ()) -> list[dict[str, Any]]:
    """The report of every rank (preflight.py). sums: bytes of all-reduces that are timed, too.

    Raises:
        OallamaError: when the ranks do not start.
    """
    with tempfile.TemporaryDirectory(prefix="oallama-") as folder:
        out = Path(folder) / "reports.json"
        program = [sys.executable, "-m", "oallama.cluster.ranks.preflight"]
        program += [str(model), group.device, group.threads, str(out), *map(str, sums)]
        try:
            done = subprocess.run(
                group.command(program),
                env=mpi.environment(),
                capture_output=True,
                text=True,
                timeout=PREFLIGHT_TIMEOUT_S,
                stdin=subprocess.DEVNULL,
            )
        except subprocess.TimeoutExpired:
            raise OallamaError(f"the ranks did not answer within {PREFLIGHT_TIMEOUT_S} s; {_where(group)}") from None
        if done.returncode or not out.is_file():
            raise OallamaError(f"mpirun cannot start the ranks ({_where(group)}): {_last_words(done.stderr)}")
        found: list[dict[str, Any]] = json.loads(out.read_text(encoding="utf-8"))
        return found


def prepare(group: RankGroup, job: RankJob, notice: Callable[[str], None]) -> tuple[RankGroup, RankJob]:
    """The group with kernels, and the job with the shares that the ranks' speed and memory give, unless it has them.

    notice: is told, a line a rank, what has to be read from disks.

    Raises:
        OallamaError: for everything that would keep the ranks from starting.
    """
    library()
    check_hosts(group)
    reports = look(group, Path(job.model))
    check_reports(reports)
    if group.kernels == "auto":
        group = replace(group, kernels=faster_kernels(reports))
    seconds = [report["kernels"][group.kernels] for report in reports]
    measured = tuple(shares(reports, seconds, group.memory != MINIMAL))
    job = job if job.shares else replace(job, shares=measured)
    if group.memory == MINIMAL:
        sharing = {RANK_SHARING.name: ",".join(map(str, ranks_of_host(reports)))}
        group = replace(group, variables={**group.variables, **sharing})
        for line in disk_floors(reports, job.shares):
            notice(line)
    return group, job


def start(group: RankGroup, job: RankJob, **options: Any) -> subprocess.Popen[Any]:
    """Start the ranks; ends with this process. `options`: of subprocess.Popen."""
    # A share is a rank's speed, as far as its memory goes.
    speeds = {RANK_SPEEDS.name: ",".join(f"{max(share, 1e-6):.6g}" for share in job.shares)}
    group = replace(group, variables={**group.variables, **speeds})
    command = group.command([sys.executable, "-m", RANK_PROGRAM, job.dumps()])
    return subprocess.Popen(
        command, env=mpi.environment(), start_new_session=True, preexec_fn=die_with_parent, **options
    )


def run(group: RankGroup, job: RankJob) -> Ended:
    """Run the ranks to their end: rank 0's exit code. SIGINT and SIGTERM end all of them."""
    ranks = start(group, job, stdin=subprocess.DEVNULL)
    with forwarded_signals(ranks) as came:
        try:
            return Ended(ranks.wait(), bool(came))
        finally:
            if ranks.poll() is None:
                ranks.terminate()
                ranks.wait()


def serve(group: RankGroup, job: RankJob, address: Address, notice: Callable[[str], None]) -> int:
    """`run`, started again when a rank failed, on the hosts that still answer; returns the last exit code.

    A group that fails before it has served for a minute is not started again. Until rank 0 listens again, at `address`,
    requests get 503, where it is on this host. notice: is told of each restart.
    """
    here = address if group.hosts[0].is_local else replace(address, port=0)
    with ExitStack() as between:
        while True:
            since = time.monotonic()
            code, asked = run(group, job)
            between.close()
            if asked or code not in _FAILED or time.monotonic() - since < RESTART_AFTER_S:
                return code
            next_starts = between.enter_context(unavailable(here, "a rank failed; the model is loaded again"))
            group = replace(group, hosts=_answering(group))
            if group.n_ranks < 2:
                return code
            arguments = tuple(word for word in job.server or () if word != REUSE_PORT)
            group, job = prepare(group, replace(job, shares=(), server=(*arguments, REUSE_PORT)), notice)
            next_starts()
            notice(f"a rank failed; serving again with {group.n_ranks} ranks on {_where(group)}")


def _answering(group: RankGroup) -> tuple[Host, ...]:
    found = []
    for host in group.hosts:
        with suppress(OallamaError):
            check_hosts(replace(group, hosts=(host,)))
            found.append(host)
    return tuple(found)


def _where(group: RankGroup) -> str:
    return ", ".join(f"{h.name}: {h.slots}" for h in group.hosts)


def _last_words(text: str) -> str:
    """mpirun's complaint without its frames."""
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("---")]
    return " ".join(lines[:6]) or "it says nothing"
