"""The quality of every link between the hosts of a cluster: what was measured, and the time a message takes on it.

Links are directed and named by their ends; a device's link to itself costs nothing and is not listed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from ...errors import OallamaError

INITIAL_WINDOW = 10 * 1448  # bytes


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and not math.isnan(value)


@dataclass(frozen=True)
class LinkQuality:
    """One direction of a link, as measured by sending a fixed payload (docs/sources.md, 5).

    Args:
        latency_s: one way, of a message without payload: half of a ping-pong's median.
        bandwidth: bytes per second of a large message (1 MB, say).
        jitter_s: largest minus smallest latency.
        loss: share of packets that are lost, in [0, 1).
        message_bytes, message_s: the mean time one way of a message of that size, with what jitter and loss do to it;
            0: not measured. Predictions use it, the objective has terms of its own for both.
        software_s: what programs at both ends add to a crossing, whatever the link.

    Raises:
        OallamaError: for a value that no link can have.
    """

    latency_s: float
    bandwidth: float
    jitter_s: float = 0.0
    loss: float = 0.0
    message_bytes: int = 0
    message_s: float = 0.0
    software_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("latency_s", "jitter_s", "message_s", "software_s"):
            value = getattr(self, name)
            if not (_is_number(value) and 0 <= value < math.inf):
                raise OallamaError(f"link {name} is {value!r}, expected 0 or more finite seconds")
        if not (_is_number(self.bandwidth) and self.bandwidth > 0):
            raise OallamaError(f"link bandwidth is {self.bandwidth!r}, expected more than 0 bytes/s")
        if not (_is_number(self.loss) and 0 <= self.loss < 1):
            raise OallamaError(f"link loss is {self.loss!r}, expected a share from 0 to below 1")

    def transfer_s(self, nbytes: float, payload_share: float = 1.0) -> float:
        """Seconds of `nbytes` on the wire, latency apart: t_ik = O / (E_p * B), E_p being `payload_share`."""
        return nbytes / (payload_share * self.bandwidth)

    def mean_s(self, nbytes: float, payload_share: float = 1.0) -> float:
        """Seconds that a message of `nbytes` is expected to take one way, software included."""
        if self.message_s:
            # The latency is part of what was measured; what is longer takes the bandwidth's time more.
            longer = self.transfer_s(nbytes - self.message_bytes, payload_share)
            return self.software_s + max(self.message_s + longer, self.latency_s)
        return self.software_s + self.latency_s + self.transfer_s(nbytes, payload_share)

    def slow_start_s(self, nbytes: float) -> float:
        """Seconds that TCP takes longer for `nbytes` after a pause: it sends ten segments, and doubles that each round.

        Linux begins so again where a connection was idle for about 0.2 s (RFC 6928, RFC 2861).
        """
        window, trip, extra = INITIAL_WINDOW, 2 * self.latency_s, 0.0
        while nbytes > window and window < self.bandwidth * trip:
            nbytes -= window
            extra += trip - window / self.bandwidth
            window *= 2
        return extra


_SAME = LinkQuality(latency_s=0.0, bandwidth=math.inf)


@dataclass(frozen=True)
class Network:
    """The links that were measured: {(from, to): LinkQuality}, both directions apart, the client among the names.

    >>> network = Network.uniform(("client", "a", "b"), LinkQuality(latency_s=2e-4, bandwidth=117e6))
    >>> network.link("a", "client").latency_s
    0.0002
    """

    links: Mapping[tuple[str, str], LinkQuality]

    @classmethod
    def uniform(cls, names: Iterable[str], quality: LinkQuality) -> Network:
        """Every two of `names` joined by the same quality, both ways."""
        ends = tuple(names)
        return cls({(a, b): quality for a in ends for b in ends if a != b})

    def link(self, source: str, target: str) -> LinkQuality:
        """The link from `source` to `target`; raises OallamaError when it was not measured."""
        if source == target:
            return _SAME
        try:
            return self.links[source, target]
        except KeyError:
            raise OallamaError(f"the link from {source} to {target} was not measured; measure it again") from None

    def to_dict(self) -> dict[str, Any]:
        """For JSON: {"links": [{"from", "to", "latency_s", "bandwidth", "jitter_s", "loss", ...}, ...]}."""
        return {"links": [{"from": a, "to": b, **asdict(link)} for (a, b), link in self.links.items()]}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Network:
        """The inverse of `to_dict`; raises OallamaError naming the entry that is wrong."""
        known = [f.name for f in fields(LinkQuality)]
        rows = content.get("links")
        if not isinstance(rows, list):
            raise OallamaError(f"network: links is {rows!r}, expected a list")
        links: dict[tuple[str, str], LinkQuality] = {}
        for at, row in enumerate(rows):
            try:
                ends = row["from"], row["to"]
                if ends in links:
                    raise OallamaError(f"the link from {ends[0]} to {ends[1]} is listed twice, expected once")
                links[ends] = LinkQuality(**{name: row[name] for name in known if name in row})
            except OallamaError as e:
                raise OallamaError(f"network: links[{at}]: {e}") from None
            except (KeyError, TypeError):
                raise OallamaError(
                    f"network: links[{at}] is {row!r}, expected from, to, latency_s and bandwidth"
                ) from None
        return cls(links)
