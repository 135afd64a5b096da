"""A device of a cluster as its client sees it: the agent on its host, its RPC server, and whether both still live."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

from oallama.errors import OallamaError

from ..allocation.devices import DeviceEntry
from ..allocation.network import LinkQuality
from . import remote
from .agent import ALIVE_S, IS_GONE, IS_STOPPED, PROGRAM
from .dialogue import Dialogue, Progress
from .link_probe import EchoClient, Effort, measure_link

START_S = 60.0
REQUEST_S = 60.0
END_S = 1.0
PROFILE_S = 1800.0
BEAT_S = 0.5
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
        self._agent = remote.start(entry, ["-m", PROGRAM], agent)
        self._stack.callback(self._agent.end, END_S)
        self._dialogue = Dialogue(self._agent, self._where(), partial(remote.advised, entry))
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

    def why_gone(self) -> str:
        """Why the device cannot be used, where `watch` cannot tell; "" here."""
        return ""

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
        return self._dialogue.ask(command, timeout_s, self._of_device(progress), **arguments)

    def _of_device(self, progress: Progress | None) -> Progress | None:
        """Says whose progress it is."""
        return progress and (lambda done, total, what: progress(done, total, f"{self.name}: {what}"))

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
