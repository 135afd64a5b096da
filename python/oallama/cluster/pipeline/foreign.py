"""A device whose RPC server somebody else started, any llama.cpp's: a phone, say. Nothing is started there."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from oallama.base.json_child import JsonChild
from oallama.errors import OallamaError

from ..allocation.devices import DeviceEntry
from ..allocation.network import LinkQuality
from .dialogue import Dialogue, Progress
from .link_probe import QUICK, Effort
from .member import REQUEST_S, Member

PROGRAM = "oallama.cluster.pipeline.foreign_agent"
CHECK_S = 5.0


class ForeignMember(Member):
    """The RPC server at the entry's address. It has no agent, so nobody watches it: its client notices its end.

    Raises:
        OallamaError: when no RPC server answers there.
    """

    def __init__(self, entry: DeviceEntry) -> None:
        self.entry, self.name, self.endpoint, self.server_pid = entry, entry.name, "", 0
        self._address = f"{entry.address[0]}:{entry.address[1]}"
        self.hello: dict[str, Any] = self._request("hello")
        if not entry.memory_bytes:
            self.entry = replace(entry, memory_bytes=int(self.hello["offered"]))

    def close(self) -> None:
        """Nothing was started."""

    @property
    def has_tunnel(self) -> bool:
        """Other hosts' agents cannot measure the way there."""
        return True

    def measure_link(self, message_bytes: int, effort: Effort = QUICK) -> LinkQuality:
        """As Member's, by the RPC server itself. effort: has no effect."""
        return LinkQuality(**self._request("link", message_bytes=message_bytes))

    def serve(self, cache_bytes: int) -> None:
        """It serves already."""
        self.endpoint = self._address

    def server_words(self) -> str:
        """Nobody hears them."""
        return ""

    def watch(
        self, message_bytes: int, beat: Callable[[float], None], lost: Callable[[str], None]
    ) -> Callable[[], None]:
        """Nothing: the server has one client at a time, and the model has it."""
        return lambda: None

    def why_gone(self) -> str:
        """Why it cannot be used, asked while no model uses it; "" if it can."""
        try:
            self._request("hello", CHECK_S)
        except OallamaError as error:
            return str(error)
        return ""

    def _request(
        self, command: str, timeout_s: float = REQUEST_S, progress: Progress | None = None, **arguments: Any
    ) -> dict[str, Any]:
        """By a process of its own, which leaves the server when it ends."""
        with JsonChild([sys.executable, "-m", PROGRAM, self._address]) as agent:
            return Dialogue(agent, self._where()).ask(command, timeout_s, self._of_device(progress), **arguments)
