"""Requests to an agent, one after another, and its answers: the client's side of agent.py."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from oallama.base.json_child import JsonChild
from oallama.errors import OallamaError

Progress = Callable[[float, float, str], None]


class Dialogue:
    """agent: the process. where: what errors call it. advised: its last words, and what to do about them."""

    def __init__(self, agent: JsonChild, where: str, advised: Callable[[str], str] = str) -> None:
        self._agent, self._where, self._advised = agent, where, advised
        self._lock = threading.Lock()
        self._number = 0  # of the last request

    def ask(self, command: str, timeout_s: float, progress: Progress | None, **arguments: Any) -> dict[str, Any]:
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
                    raise OallamaError(f"{self._where} did not answer within {timeout_s:g} s ({command})") from None
                if said is None:
                    raise OallamaError(f"{self._where} cannot be used: {self._advised(self._agent.last_words())}")
                if said.get("number", self._number) != self._number:
                    continue  # the answer to a request that was given up
                if "progress" in said:
                    if progress:
                        progress(*said["progress"])
                elif "error" in said:
                    raise OallamaError(f"{self._where}: {said['error']}")
                else:
                    answer: dict[str, Any] = said["answer"]
                    return answer
