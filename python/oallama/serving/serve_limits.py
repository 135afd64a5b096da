"""What a llama-server of ours takes and how it ends (csrc/serve/admission.h)."""

from __future__ import annotations

from dataclasses import dataclass

from oallama.base.environment import DRAIN_S, REQUEST_LIMIT


@dataclass(frozen=True)
class Limits:
    """queue: requests of a model that may wait while others are served; more get 503 with Retry-After.

    drain_s: seconds that a server which is to end gives the requests it has taken; new ones get 503 meanwhile.
    """

    queue: int = 64
    drain_s: float = 30.0

    def of_server(self, n_sequences: int) -> dict[str, str]:
        """Variables of a server of one model that serves n_sequences requests at once."""
        return {REQUEST_LIMIT.name: str(n_sequences + self.queue), DRAIN_S.name: f"{self.drain_s:g}"}

    def of_router(self) -> dict[str, str]:
        """Variables of a router: its models have limits, and it waits for all of them."""
        return {DRAIN_S.name: f"{self.drain_s:g}"}
