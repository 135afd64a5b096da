"""What runs on the host of a device: `python -m oallama.cluster.pipeline.agent`, started by remote.py.

It measures the device, starts its RPC server, and says what becomes of it. Requests are lines of JSON on standard
input, each answered by one line on standard output; "progress" lines may come before. It ends, and the server with it,
when standard input does, and when nothing has come there for 30 s: a client sends empty lines meanwhile.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from oallama.base.children import die_with_parent, last_words
from oallama.base.environment import RPC_TIMEOUT, RPC_TOKEN_FILE
from oallama.engine.rpc import LocalRpcServer, server_environment, share_processor
from oallama.errors import OallamaError

from .link_probe import Echo, measure_link

PROGRAM = "oallama.cluster.pipeline.agent"
TIMEOUT_S = "4"  # until a peer is given up that the network has lost
START_TIMEOUT_S = 20.0
ALIVE_S = 5.0  # between a client's signs of life
SILENCE_S = 30.0
# The echo's first byte: what the RPC server does.
NO_SERVER, RUNS, IS_STOPPED, IS_GONE = range(4)


FREE_SHARE = 0.8  # of the memory that is free, offered where nobody says how much


@dataclass(frozen=True)
class Offer:
    """What a host lends to clients that do not say what they want of it.

    device: ggml's name, None: the first accelerator, else the CPU. threads: of the CPU, 0: all. memory_bytes: 0: most
    of what is free when a client comes.
    """

    device: str | None = None
    threads: int = 0
    memory_bytes: int = 0


class Agent:
    """Answers requests; one method per command, its keywords the request's, its result the answer's."""

    def __init__(self, offer: Offer, progress: Callable[[float, float, str], None]) -> None:
        self._offer, self._progress = offer, progress
        self._server: subprocess.Popen[bytes] | None = None
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the process)
        self._echo: Echo | None = None

    def hello(self, device: str | None) -> dict[str, Any]:
        """Who this is, and what it offers; device: ggml's name of the device to use, None: the offered one."""
        from oallama.engine import device_list, native
        from oallama.loading import autoplan
        from oallama.profiling.fingerprint import cpu_set

        core = native.core()
        chosen = device_list.device(device or self._offer.device or autoplan.find_accelerator() or "CPU")
        free = core.host_memory() if chosen.name == "CPU" else chosen.memory_free
        machine = Path("/proc/sys/kernel/random/boot_id").read_text().strip()  # containers of one machine share it
        return {"machine": machine, "pid": os.getpid(), "engine": core.ENGINE_ID} | {
            "device": chosen.name,
            "description": chosen.description,
            "memory": free,
            "offered": self._offer.memory_bytes or int(FREE_SHARE * free),
            "threads": self._offer.threads or len(cpu_set()),
        }

    def listen(self, address: str, port: int, token: str) -> dict[str, Any]:
        """Start the echo that links are measured with, and that says what the server does."""
        try:
            self._echo = Echo((address, port), bytes.fromhex(token), self._state)
        except OSError as error:
            raise OallamaError(f"the probe cannot listen on {address}:{port}: {error.strerror}") from None
        return {}

    def probe(self, address: str, port: int, token: str, message_bytes: int) -> dict[str, Any]:
        """The link from here to another agent's echo."""
        return vars(measure_link((address, port), bytes.fromhex(token), message_bytes))

    def profile(self, graph: str, device: str, threads: int, options: dict[str, Any]) -> dict[str, Any]:
        """Times of the model's operators behind an RPC server, as they will run, and seconds that a change of device
        costs there beside the link.
        """
        from oallama.planning import OperatorGraph
        from oallama.profiling.fingerprint import cpu_set
        from oallama.profiling.profiler import profile_machine

        n_threads = threads or len(cpu_set())
        with LocalRpcServer(n_threads, device=device) as server:
            (name,) = server.devices
            found = profile_machine(
                OperatorGraph.from_json(graph),
                [name],
                n_threads=n_threads,
                alone=True,
                progress=self._progress,
                **options,
            )
        times = {kind: [vars(entry) for entry in getattr(found, kind)] for kind in ("operators", "attention")}
        return {"name": name, "times": times, "software_s": found.switch_time(name) or 0.0}

    def serve(self, address: str, port: int, token: str, device: str, threads: int, cache_bytes: int) -> dict[str, Any]:
        """Start the RPC server; it keeps up to `cache_bytes` of weights for the next time, 0: none."""
        from oallama.engine import runtime
        from oallama.profiling.fingerprint import cpu_set

        try:
            socket.create_server((address, port)).close()
        except OSError as error:
            raise OallamaError(f"an RPC server cannot listen on {address}:{port}: {error.strerror}") from None
        command = [str(runtime.program("ggml-rpc-server")), "--port", str(port), "--device", device]
        n_threads = threads or len(cpu_set())
        command += ["--threads", str(n_threads), "--listen", address]
        environment = server_environment(device, n_threads) | {RPC_TIMEOUT.name: TIMEOUT_S}
        if cache_bytes:
            folder = weights_folder() / f"{device}-{port}"
            prune(folder / "rpc", cache_bytes)
            environment["LLAMA_CACHE"] = str(folder)
            command += ["--cache"]
        with tempfile.NamedTemporaryFile(prefix="oallama-") as file:  # the server has read it when it listens
            file.write(token.encode())
            file.flush()
            self._server = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                env=environment | {RPC_TOKEN_FILE.name: file.name},
                preexec_fn=die_with_parent,
            )
            self._wait_until_up(address, port)
        return {"pid": self._server.pid}

    def stop(self) -> dict[str, Any]:
        """End the server."""
        if self._server is not None:
            self._server.kill()
            self._server.wait()
            self._server = None
        return {}

    def words(self) -> dict[str, Any]:
        """How the server has ended: by which signal, or with which last line."""
        code = self._server.poll() if self._server else None
        return {"words": f"killed by signal {-code}" if code is not None and code < 0 else last_words(self._log)}

    def _wait_until_up(self, address: str, port: int) -> None:
        assert self._server is not None
        end = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < end:
            if self._server.poll() is not None:
                raise OallamaError(f"the RPC server on {address}:{port} ended at once: {last_words(self._log)}")
            with suppress(OSError):
                socket.create_connection((address, port), timeout=1).close()
                return
            time.sleep(0.02)
        raise OallamaError(f"the RPC server did not listen within {START_TIMEOUT_S:g} s: {last_words(self._log)}")

    def _state(self) -> int:
        if self._server is None:
            return NO_SERVER
        if self._server.poll() is not None:
            return IS_GONE
        listener = f"/proc/{self._server.pid}"
        with suppress(OSError):
            workers = Path(f"{listener}/task/{self._server.pid}/children").read_text().split()
            return IS_STOPPED if any(map(_is_stopped, [str(self._server.pid), *workers])) else RUNS
        return IS_GONE


def _is_stopped(process: str) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
    return False  # a worker that has just ended


def weights_folder() -> Path:
    """Where RPC servers keep weights: `$XDG_CACHE_HOME/oallama/weights`, by default under `~/.cache`."""
    from oallama.profiling.recorder import cache_dir

    return cache_dir() / "weights"


def prune(folder: Path, limit: int) -> None:
    """Remove the files that were read longest ago until the others take at most `limit` bytes."""
    files = []
    with suppress(OSError):
        files = [(path.stat(), path) for path in folder.iterdir() if path.is_file()]
    excess = sum(stat.st_size for stat, _ in files) - limit
    for stat, path in sorted(files, key=lambda file: max(file[0].st_atime, file[0].st_mtime)):
        if excess <= 0:
            return
        with suppress(OSError):
            path.unlink()
            excess -= stat.st_size


def answer_requests(agent_of: Callable[[Callable[[float, float, str], None]], Any]) -> None:
    """Answer what comes on standard input, until it ends. agent_of: makes the agent from what tells progress."""
    # Libraries write to standard output: answers have a descriptor of their own.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def say(content: dict[str, Any]) -> None:
        answers.write(json.dumps(content) + "\n")

    share_processor()  # before the engine is loaded
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is for the client, which ends us
    agent = agent_of(lambda done, total, what: say({"progress": [done, total, what]}))
    requests: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(requests,), daemon=True).start()
    while line := requests.get():
        request = json.loads(line)
        number = request.pop("number")
        try:
            say({"number": number, "answer": getattr(agent, request.pop("command"))(**request)})
        except (OallamaError, OSError, RuntimeError, ValueError) as error:
            say({"number": number, "error": str(error)})
    agent.stop()


def _listen(requests: queue.SimpleQueue[str]) -> None:
    """Puts requests there, and an empty text when the client is gone; ends the process when it has fallen silent."""
    heard = time.monotonic()

    def watch() -> None:
        while time.monotonic() - heard < SILENCE_S:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    for line in sys.stdin:
        heard = time.monotonic()
        if line.strip():
            requests.put(line)
    requests.put("")


def main() -> None:
    offer = Offer(**json.loads(sys.argv[1])) if len(sys.argv) > 1 else Offer()
    answer_requests(partial(Agent, offer))


if __name__ == "__main__":
    main()
