"""Watches the devices of a running pipeline: which one is gone, whose link has become slower."""

from __future__ import annotations

import queue
import statistics
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from .member import Member
from .replan import LEAST_S

# A link is judged by this many round trips, twice a second, against as many at the beginning.
WINDOW = 10


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
    """Puts a Lost for every device concerned into `events`, until it is closed; a context manager.

    After `begin` a Slower too, for a link that is slower than it then was; the new level is then the usual one.
    threshold: ratio from which a link counts as slower.
    """

    def __init__(self, members: Iterable[Member], message_bytes: int, events: queue.Queue, threshold: float) -> None:  # type: ignore[type-arg]
        self._events, self._threshold, self._begun = events, threshold, False
        self._stops = [
            member.watch(message_bytes, self._beats(member.name), self._lost(member.name)) for member in members
        ]

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *_: object) -> None:
        for stop in self._stops:
            stop()

    def begin(self) -> None:
        """The model is loaded: from now on links carry what they usually carry."""
        self._begun = True

    def _lost(self, name: str) -> Callable[[str], None]:
        return lambda why: self._events.put(Lost(name, why))

    def _beats(self, name: str) -> Callable[[float], None]:
        first: list[float] = []
        last: deque[float] = deque(maxlen=WINDOW)

        def beat(seconds: float) -> None:
            if not self._begun:
                return
            if len(first) < WINDOW:
                first.append(seconds)
                return
            last.append(seconds)
            if len(last) < WINDOW:
                return
            ratio = statistics.median(last) / max(statistics.median(first), LEAST_S)
            if ratio > self._threshold:
                first[:] = last
                last.clear()
                self._events.put(Slower(name, ratio))

        return beat
