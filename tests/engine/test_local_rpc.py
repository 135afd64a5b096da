"""The threads of a loopback RPC server: one on each CPU, where it has so many."""

import os
import subprocess

import pytest

from oallama.engine.rpc import LocalRpcServer


def workers() -> set[int]:
    """Of the RPC servers that this process has started."""
    pids = [os.getpid()]
    for _ in ("servers", "their workers"):
        parents = ",".join(map(str, pids))
        found = subprocess.run(["pgrep", "-P", parents, "ggml-rpc-server"], capture_output=True, text=True).stdout
        pids = [int(pid) for pid in found.split()]
        if not pids:
            break
    return set(pids)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one CPU is all CPUs")
@pytest.mark.parametrize(("threads", "n_cpus"), [(None, 1), (1, len(os.sched_getaffinity(0)))])
def test_a_server_with_a_thread_for_every_cpu_binds_them(threads: int | None, n_cpus: int) -> None:
    before = workers()
    with LocalRpcServer(threads=threads, register=False):
        (worker,) = workers() - before
        assert len(os.sched_getaffinity(worker)) == n_cpus
