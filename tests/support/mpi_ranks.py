"""Ranks that mpirun starts for one test."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from oallama.cluster.ranks import mpi
from oallama.errors import OallamaError

# Ranks outnumber the cores.
YIELD = ("--mca", "mpi_yield_when_idle", "1")
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
# mpirun ends the job when a rank dies or leaves without finalising MPI, unless it was asked to tolerate that.
SURVIVE = ("--with-ft", "ulfm")
Ranks = Callable[..., dict[int, Any]]


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Ranks]:
    """`ranks(job, hosts)`: what every rank of the job reported. Whatever it started is gone afterwards."""
    try:
        mpi.find_mpirun()
    except OallamaError as error:
        pytest.skip(str(error))
    started: list[subprocess.Popen[str]] = []

    def run(
        job: str,
        hosts: str,
        *flags: str,
        missing: int | None = None,
        limit: float = 60.0,
        program: str = "support.comm_worker",
    ) -> dict[int, Any]:
        # Open MPI leaves its own shared files behind when ranks die: not in /dev/shm.
        files = ("--mca", "btl_sm_backing_directory", str(tmp_path))
        worker = (sys.executable, "-m", program, job, hosts, str(tmp_path))
        host = mpi.Host("localhost", len(hosts))
        command = mpi.mpirun([host], worker, ONE_THREAD, flags=(*YIELD, *files, *flags))
        process = subprocess.Popen(
            command, env=mpi.environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            start_new_session=True,
        )  # fmt: skip
        started.append(process)
        wanted = [rank for rank in range(len(hosts)) if rank != missing]
        until = time.monotonic() + limit
        while process.poll() is None and not all((tmp_path / f"{rank}.json").exists() for rank in wanted):
            assert time.monotonic() < until, f"{job} on {hosts} did not end"
            time.sleep(0.05)
        if missing is not None:  # a stopped rank would be waited for
            with suppress(ProcessLookupError):
                os.kill(int((tmp_path / "victim").read_text()), signal.SIGKILL)
        output = process.communicate(timeout=limit)[0]
        reports = {rank: tmp_path / f"{rank}.json" for rank in wanted}
        assert all(path.exists() for path in reports.values()), output
        return {rank: json.loads(path.read_text()) for rank, path in reports.items()}

    yield run
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    assert not still_running(tmp_path)


def still_running(folder: Path) -> list[int]:
    """Workers of this test that are left; the shared memory has no name and goes with them."""
    left = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if str(folder) in path.read_text():
                left.append(int(path.parent.name))
        except OSError:
            continue
    return left
