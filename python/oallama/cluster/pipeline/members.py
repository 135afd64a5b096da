"""A device of a cluster as its client sees it: the agent on its host, its RPC server, and whether both still live."""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

from oallama.base.environment import RPC_HASH_BYTES, RPC_TIMEOUT, RPC_TOKEN_FILE
from oallama.errors import OallamaError

from ..allocation.devices import DeviceEntry
from ..allocation.network import LinkQuality
from . import remote
from .agent import ALIVE_S, IS_GONE, IS_STOPPED, PROGRAM, TIMEOUT_S
from .link_probe import EchoClient, Effort, measure_link

Progress = Callable[[float, float, str], None]

START_S = 60.0
REQUEST_S = 60.0
END_S = 1.0
PROFILE_S = 1800.0
BEAT_S = 0.5
# Smaller tensors are sent faster than asked for (ggml's own limit is 10 MiB).
HASH_BYTES = "65536"
SILENCE_S = 3.5  # of the echo, after which a device is given up


class Member:
    """The agent of one device, started when this is made; a context manager that ends it.

    token: what RPC server and echo ask for. agent: what starts programs on other hosts in place of ssh.

    Attributes:
        entry: the device's; where it names no memory, with the memory and threads that its host offers.
        hello: what the agent says of itself (agent.py).
        endpoint, server_pid: host:port where this process reaches the RPC server, and its process there; after `serve`.

    Raises:
        OallamaError: when the host cannot be reached, or runs another version of oallama.
    """

    def __init__(self, entry: DeviceEntry, token: bytes, agent: str | None = None) -> None:
        self.entry, self.name, self.endpoint, self.server_pid = entry, entry.name, "", 0
        self._token = token
        self._stack = ExitStack()
        self._lock = threading.Lock()
        self._number = 0  # of the last request
        self._agent = remote.start(entry, ["-m", PROGRAM], agent)
        self._stack.callback(self._agent.end, END_S)
        threading.Thread(target=self._show_life, daemon=True).start()
        try:
            self.hello: dict[str, Any] = self._request("hello", timeout_s=START_S, device=entry.device)
            self._check_engine()
            if not entry.memory_bytes:
                offered, threads = int(self.hello["offered"]), int(self.hello["threads"])
                self.entry = entry = replace(entry, memory_bytes=offered, threads=threads)
            self._request("listen", address=entry.address[0], port=entry.echo_port, token=token.hex())
            self._echo = self._way((entry.address[0], entry.echo_port))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Member:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the agent, its server and the tunnels."""
        self._stack.close()

    @property
    def has_tunnel(self) -> bool:
        """Whether its host is reached through ssh alone."""
        return self.entry.is_loopback and not self.entry.is_local

    def profile(self, graph: str, options: dict[str, Any], progress: Progress) -> dict[str, Any]:
        """The agent's `profile` of the model's operators (OperatorGraph as JSON)."""
        arguments = {"graph": graph, "device": self.hello["device"], "threads": self.entry.threads, "options": options}
        return self._request("profile", timeout_s=PROFILE_S, progress=progress, **arguments)

    def measure_link(self, message_bytes: int, effort: Effort = Effort()) -> LinkQuality:  # noqa: B008 (it is frozen)
        """The link between this host and the device's."""
        return measure_link(self._echo, self._token, message_bytes, datagrams=not self.has_tunnel, effort=effort)

    def measure_link_to(self, other: Member, message_bytes: int) -> LinkQuality:
        """The link between this device's host and another's, which must not be behind a tunnel."""
        address, port = other._echo
        found = self._request("probe", address=address, port=port, token=self._token.hex(), message_bytes=message_bytes)
        return LinkQuality(**found)

    def serve(self, cache_bytes: int) -> None:
        """Start the RPC server. Raises OallamaError when it does not come up, as when its port is in use."""
        address, port = self.entry.address
        arguments = {"token": self._token.hex(), "device": self.hello["device"], "threads": self.entry.threads}
        found = self._request("serve", address=address, port=port, cache_bytes=cache_bytes, **arguments)
        self.server_pid = int(found["pid"])
        host, port = self._way((address, port))
        self.endpoint = f"{host}:{port}"

    def server_words(self) -> str:
        """What its server has said last, or why that cannot be known."""
        try:
            return str(self._request("words", timeout_s=1.0)["words"])
        except OallamaError as error:
            return str(error)

    def watch(
        self, message_bytes: int, beat: Callable[[float], None], lost: Callable[[str], None]
    ) -> Callable[[], None]:
        """Exchange `message_bytes` with the host twice a second from now on; returns what ends it.

        beat: gets the seconds of each round trip. lost: is told once why the device cannot be used any more. Both are
        called by a thread of its own.
        """
        stopped = threading.Event()

        def look() -> None:
            why = "its host"
            try:
                with EchoClient(self._echo, self._token, SILENCE_S) as echo:
                    while not stopped.wait(BEAT_S):
                        seconds, state = echo.round_trip(message_bytes, SILENCE_S)
                        if state in (IS_GONE, IS_STOPPED):
                            why = "is stopped" if state == IS_STOPPED else f"has ended: {self.server_words()}"
                            lost(f"the RPC server of {self.name} {why}")
                            return
                        beat(seconds)
            except TimeoutError:
                why = f"has not answered for {SILENCE_S:g} s"
            except (OSError, OallamaError) as error:
                why = f"cannot be reached: {error}"
            if not stopped.is_set():
                lost(f"the host of {self.name} {why}")

        threading.Thread(target=look, daemon=True).start()
        return stopped.set

    # ---- the agent ---------------------------------------------------------------------------------------------------

    def _way(self, address: tuple[str, int]) -> tuple[str, int]:
        """Where this process reaches an address of the device's host."""
        if not self.has_tunnel:
            return address
        tunnel = remote.Tunnel(self.entry, address[1])
        self._stack.callback(tunnel.close)
        return tunnel.address

    def _request(
        self, command: str, timeout_s: float = REQUEST_S, progress: Progress | None = None, **arguments: Any
    ) -> dict[str, Any]:
        """Raises OallamaError for the agent's own errors, and when it does not answer."""
        with self._lock:
            self._number += 1
            request = {"number": self._number, "command": command, **arguments}
            # A stopped agent takes no more than a pipe holds: whoever writes must not be the one who waits for it.
            threading.Thread(target=self._agent.tell, args=(request,), daemon=True).start()
            end = time.monotonic() + timeout_s
            while True:
                try:
                    said = self._agent.hear(max(0.0, end - time.monotonic()))
                except TimeoutError:
                    raise OallamaError(f"{self._where()} did not answer within {timeout_s:g} s ({command})") from None
                if said is None:
                    why = remote.advised(self.entry, self._agent.last_words())
                    raise OallamaError(f"{self._where()} cannot be used: {why}")
                if said.get("number", self._number) != self._number:
                    continue  # the answer to a request that was given up
                if "progress" in said:
                    if progress:
                        done, total, what = said["progress"]
                        progress(done, total, f"{self.name}: {what}")
                elif "error" in said:
                    raise OallamaError(f"{self._where()}: {said['error']}")
                else:
                    answer: dict[str, Any] = said["answer"]
                    return answer

    def _show_life(self) -> None:
        while self._agent.process.poll() is None:
            self._agent.show_life()
            time.sleep(ALIVE_S)

    def _check_engine(self) -> None:
        from oallama.engine import native

        ours = native.core().ENGINE_ID
        if self.hello["engine"] != ours:
            raise OallamaError(
                f"{self._where()} runs engine {self.hello['engine'][:8]}, this host {ours[:8]}; "
                "bring both to the same version"
            )

    def _where(self) -> str:
        return f"device {self.name}" + ("" if self.entry.is_local else f" on {self.entry.host}")


@contextmanager
def members(
    entries: Iterable[DeviceEntry], agent: str | None = None, missing: Callable[[str, OallamaError], None] | None = None
) -> Iterator[list[Member]]:
    """Agents on all hosts, started at once; all end with the block. Within it this process and those it starts know
    their servers' token.

    missing: is told of devices that cannot be used, which are then left out.

    Raises:
        OallamaError: for the first device, in order, that cannot be used, unless there is `missing`.
    """
    token = os.urandom(32)
    entries = list(entries)
    found: list[Member] = []
    with ThreadPoolExecutor(max(1, len(entries))) as pool, ExitStack() as stack:
        errors: dict[str, OallamaError] = {}
        for entry, start in [(entry, pool.submit(Member, entry, token, agent)) for entry in entries]:
            try:
                found.append(stack.enter_context(start.result()))
            except OallamaError as error:
                errors[entry.name] = error
        for name, why in errors.items():
            if missing is None:
                raise why
            missing(name, why)
        file = stack.enter_context(tempfile.NamedTemporaryFile(prefix="oallama-"))  # readable by its owner alone
        file.write(token.hex().encode())
        file.flush()
        for variable, value in ((RPC_TOKEN_FILE, file.name), (RPC_TIMEOUT, TIMEOUT_S), (RPC_HASH_BYTES, HASH_BYTES)):
            os.environ[variable.name] = value
            stack.callback(os.environ.pop, variable.name, None)
        yield found
