"""How long a search may take, so that other programs do not make what it finds worse."""

from __future__ import annotations

import time

PATIENCE = 4.0
_TELLING_S = 0.05  # computing for less does not tell how busy the CPUs are


class Deadline:
    """Passes when the calling thread has computed for `seconds`, at last after PATIENCE times as many on the clock.

    A thread that shares its CPU with other programs computes for a part of the time. It gets as many seconds of
    computing as one that has its CPU alone.

    >>> Deadline(0.0).is_passed
    True
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._computed, self._began = time.thread_time(), time.monotonic()

    @property
    def is_passed(self) -> bool:
        return self.left_s <= 0

    @property
    def left_s(self) -> float:
        """Seconds on the clock until it passes, if the CPUs stay as busy as they were since it was made."""
        computed, on_clock = time.thread_time() - self._computed, time.monotonic() - self._began
        slower = min(PATIENCE, on_clock / computed) if computed > _TELLING_S else 1.0
        return min((self._seconds - computed) * slower, PATIENCE * self._seconds - on_clock)
