"""What a network does to packets: rate, delay, jitter, loss; and the texts that say so ("1gbit", "0.2ms", "1%")."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

MIN_QUEUE = 128 * 1024  # two of the largest frames


@dataclass(frozen=True)
class Conditions:
    """Conditions of a host's link, or of the path from one host to another.

    Args:
        rate_bit: bits per second on the cable, both directions at once (None, the default: no limit). Each packet pays
            for 24 bytes of Ethernet overhead: 1e9 carries 0.94e9 of TCP payload.
        delay_s: one-way delay in seconds; an RTT has the delays of both directions.
        jitter_s: each packet's delay is uniform in delay_s +- jitter_s; packets never overtake one another.
        loss: probability of losing a packet, 0 to 1.
        queue_bytes: what may wait at a full link; more is dropped (default 4 MiB).

    Raises ValueError for values out of range.
    """

    rate_bit: float | None = None
    delay_s: float = 0.0
    jitter_s: float = 0.0
    loss: float = 0.0
    queue_bytes: int = 4 * 2**20

    def __post_init__(self) -> None:
        if self.rate_bit is not None and not 1e3 <= self.rate_bit <= 1e12:
            raise ValueError(f"rate_bit: expected 1e3 to 1e12 bit/s, or None for no limit, got {self.rate_bit!r}")
        if not 0 <= self.delay_s <= 60:
            raise ValueError(f"delay_s: expected 0 to 60 seconds, got {self.delay_s!r}")
        if not 0 <= self.jitter_s <= self.delay_s:
            raise ValueError(f"jitter_s: expected 0 to the delay ({self.delay_s} s), got {self.jitter_s!r}")
        if not 0 <= self.loss <= 1:
            raise ValueError(f"loss: expected 0 to 1, got {self.loss!r}")
        if not MIN_QUEUE <= self.queue_bytes <= 2**30:
            raise ValueError(f"queue_bytes: expected {MIN_QUEUE} to {2**30}, got {self.queue_bytes!r}")


# Of all hosts alike; or by host, or by (from, to). A host's conditions hold for what it sends, its rate also for what
# it receives. Those of a pair replace the host's delay, jitter and loss, and their rate is a limit of its own.
Network = Conditions | Mapping[int | tuple[int, int], Conditions]

_RATES = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_TIMES = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


def parse_rate(text: str) -> float | None:
    """Bits per second of e.g. "1gbit", "2.5Gbit", "100mbit"; None of "unlimited". Raises ValueError."""
    if text.strip().lower() == "unlimited":
        return None
    return _number(text, _RATES, "a rate such as 1gbit, 100mbit or unlimited")


def parse_time(text: str) -> float:
    """Seconds of e.g. "0.2ms", "50us", "1s". Raises ValueError."""
    return 0.0 if text.strip() == "0" else _number(text, _TIMES, "a time such as 0.2ms, 50us or 1s")


def parse_share(text: str) -> float:
    """Share of e.g. "1%" or "0.01". Raises ValueError."""
    return _number(text, {"": 1.0, "%": 0.01}, "a share such as 1% or 0.01")


def _number(text: str, units: Mapping[str, float], expected: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+)\s*([a-z%]*)", text.strip().lower())
    if match is None or match[2] not in units:
        raise ValueError(f"expected {expected}, got {text!r}")
    return float(match[1]) * units[match[2]]
