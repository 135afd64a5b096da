"""A loopback RPC server as an accelerator: a real second device with memory of its own, on a machine without a GPU.

Invariant: a server whose devices were registered lives as long as this process. ggml cannot forget a device, and aborts
the process when it asks one whose server is gone.
"""

from __future__ import annotations

import os
import socket
import subprocess
import tempfile
import time
from types import TracebackType

from oallama.base.children import die_with_parent, last_words
from oallama.base.environment import BIND_THREADS, THREADS
from oallama.base.ports import free_port
from oallama.engine import device_list, runtime
from oallama.errors import OallamaError

START_TIMEOUT_S = 20.0
# 0.2 to 0.3 ms: longer than the gaps inside a graph, shorter than a wait for the other side, and than the time in which
# csrc/base/busy_cpus.cpp looks for other programs.
SPIN_COUNT = "20000"
# Of OpenMP. Who says where threads run has OpenMP's.
_PLACES = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY")


def share_processor() -> None:
    """Let idle threads sleep soon, in this process and those it starts; call it before the engine is loaded.

    A loopback device computes on the client's own cores. By default threads that wait for the other side keep those
    cores from it for milliseconds at every device change. A value the user has set stays.
    """
    os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)


def server_environment(device: str, threads: int) -> dict[str, str]:
    """This process's variables for an RPC server: its threads stay on one CPU each, where all CPUs are theirs.

    Else Linux wakes two threads of a server on one CPU now and then. What the user has set of that stays.
    """
    said = any(map(os.environ.get, (BIND_THREADS.name, *_PLACES)))
    binds = device == "CPU" and threads == len(os.sched_getaffinity(0)) and not said
    bound = (
        {"OMP_PROC_BIND": "true", "OMP_PLACES": "threads"} if THREADS.get() == "openmp" else {BIND_THREADS.name: "1"}
    )
    return {**os.environ, **(bound if binds else {})}


class LocalRpcServer:
    """`ggml-rpc-server` with one device, on 127.0.0.1 and a free port; a context manager.

    Start it from a thread that lives as long as it is needed: the kernel ends it with the thread that started it.

    Args:
        device: ggml's name of the device behind it.
        threads: CPU threads; default: the CPUs this process may use (client and server compute in turns).
        register: make its devices known to this process; they are then `devices`, and the server lives until the
            process ends. False: it is for another process and ends with the `with` block.

    Raises:
        OallamaError: when the build has no RPC server or it does not come up.

    >>> with LocalRpcServer() as server:
    ...     llm = Llama("model.gguf", vram="2GiB")  # on server.devices[0]
    """

    def __init__(self, threads: int | None = None, register: bool = True, device: str = "CPU") -> None:
        share_processor()
        self.endpoint = f"127.0.0.1:{free_port()}"
        self.devices: list[str] = []
        self._register = register
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the server)
        host, port = self.endpoint.split(":")
        program = str(runtime.program("ggml-rpc-server"))
        command = [program, "--host", host, "--port", port, "--device", device, "--isolate"]
        threads = threads or len(os.sched_getaffinity(0))
        self._process = subprocess.Popen(
            [*command, "--threads", str(threads)],
            env=server_environment(device, threads),
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            preexec_fn=die_with_parent,
            start_new_session=True,  # a Ctrl-C in the terminal must not reach it: ggml would abort this process
        )
        try:
            self._wait_until_up()
            if register:
                self.devices = device_list.add_rpc_server(self.endpoint)
        except BaseException:
            self._stop()
            raise

    def __enter__(self) -> LocalRpcServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._register:
            self._stop()

    def _wait_until_up(self) -> None:
        host, port = self.endpoint.split(":")
        end = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < end:
            if self._process.poll() is not None:
                raise OallamaError(f"the local RPC server ended at once: {last_words(self._log)}")
            try:
                socket.create_connection((host, int(port)), timeout=1).close()
                return
            except OSError:
                time.sleep(0.02)
        raise OallamaError(f"the local RPC server did not answer within {START_TIMEOUT_S:g} s: {last_words(self._log)}")

    def _stop(self) -> None:
        self._process.kill()
        self._process.wait()
        self._log.close()
