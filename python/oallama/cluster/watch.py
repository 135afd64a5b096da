"""Watches the devices of a running pipeline: which one is gone, whose link has become slower."""

from __future__ import annotations

import queue
import statistics
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from .members import Member

# A link is judged by this many round trips, twice a second, against as many at the beginning.
WINDOW = 10
# Below this a change is the processors' and not the link's.
LEAST_S = 1e-3


@dataclass(frozen=True)
class Lost:
    """A device that cannot be used any more."""

    name: str
    why: str


@dataclass(frozen=True)
class Slower:
    """A link on which messages take `ratio` times as long as at the beginning."""

    name: str
    ratio: float


class Watch:
    """Puts a Lost or Slower for every device concerned into `events`, until it is closed; a context manager.

    threshold: ratio from which a link counts as slower.
    """

    def __init__(self, members: Iterable[Member], message_bytes: int, events: queue.Queue, threshold: float) -> None:  # type: ignore[type-arg]
        self._events, self._threshold = events, threshold
        self._stops = [
            member.watch(message_bytes, self._beats(member.name), self._lost(member.name)) for member in members
        ]

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *_: object) -> None:
        for stop in self._stops:
            stop()

    def _lost(self, name: str) -> Callable[[str], None]:
        return lambda why: self._events.put(Lost(name, why))

    def _beats(self, name: str) -> Callable[[float], None]:
        first: list[float] = []
        last: deque[float] = deque(maxlen=WINDOW)

        def beat(seconds: float) -> None:
            if len(first) < WINDOW:
                first.append(seconds)
                return
            last.append(seconds)
            if len(last) < WINDOW:
                return
            ratio = statistics.median(last) / max(statistics.median(first), LEAST_S)
            if ratio > self._threshold:
                last.clear()
                self._events.put(Slower(name, ratio))

        return beat
