"""Loopback RPC servers: the CPUs of their threads, and what this process may ask when one is gone."""

import json
import os

import pytest

from support.processes import ran_python

N_CPUS = len(os.sched_getaffinity(0))

# Computes on a server with so many threads; prints the CPUs of each thread of the worker.
COMPUTE = """
import json, os, subprocess, sys
from oallama.engine import native
from oallama.engine.rpc import LocalRpcServer
server = LocalRpcServer(threads=int(sys.argv[1]))
bench = native.core().OpBench(server.devices[0], 1, True, 1 << 20)
bench.mul_mat(type="f16", k=1024, m=1024, n_tokens=1, n_expert=0, n_used=0, max_s=0.01)
pids = [os.getpid()]
for _ in ("server", "worker"):
    found = subprocess.run(["pgrep", "-P", ",".join(map(str, pids)), "ggml-rpc-server"], capture_output=True, text=True)
    pids = found.stdout.split()
print(json.dumps([sorted(os.sched_getaffinity(int(thread))) for thread in os.listdir(f"/proc/{pids[0]}/task")]))
"""

ASK = """
import os, signal, subprocess
from oallama.data.plan import HOST
from oallama.engine import device_list
from oallama.engine.rpc import LocalRpcServer
from oallama.profiling.fingerprint import fingerprint
server = LocalRpcServer(threads=1)
pid = subprocess.run(["pgrep", "-P", str(os.getpid()), "ggml-rpc-server"], capture_output=True, text=True).stdout
os.kill(int(pid), signal.SIGKILL)
assert fingerprint([HOST], 1) and device_list.device(HOST).type == "cpu"
assert not device_list.rpc_server_answers(server.endpoint, within_s=5)
"""


@pytest.mark.skipif(N_CPUS < 2, reason="one CPU is all CPUs")
@pytest.mark.parametrize("threads", [1, N_CPUS])
def test_a_thread_for_every_cpu_stays_on_it(threads: int) -> None:
    cpus: list[list[int]] = json.loads(ran_python(COMPUTE, str(threads)).stdout)
    everywhere = sorted(os.sched_getaffinity(0))
    if threads == N_CPUS:
        assert all(len(each) == 1 for each in cpus) and sorted({cpu for each in cpus for cpu in each}) == everywhere
    else:
        assert all(each == everywhere for each in cpus)


def test_the_cpu_can_be_asked_about_after_a_server_died() -> None:
    ran_python(ASK)
