"""What other programs take of the CPUs meanwhile."""

from __future__ import annotations

import time

from oallama.engine import native


class OtherWork:
    """Counts CPU time of other processes within the block; what this process has started is its own.

    cpus: CPUs that others kept busy on average, once the block has ended; 0 where Linux is not.
    """

    def __init__(self) -> None:
        self.cpus = 0.0
        self._others_s = self._begin = 0.0

    def __enter__(self) -> OtherWork:
        self._others_s, self._begin = _others_s(), time.monotonic()
        return self

    def __exit__(self, *_: object) -> None:
        self.cpus = self.so_far()

    def so_far(self) -> float:
        """CPUs that others kept busy since the block began."""
        passed = time.monotonic() - self._begin
        return max(0.0, _others_s() - self._others_s) / passed if passed > 0 else 0.0


def cpus_of_others(seconds: float = 0.2) -> float:
    """CPUs that others keep busy during the next seconds."""
    with OtherWork() as others:
        time.sleep(seconds)
    return others.cpus


def _others_s() -> float:
    return float(native.core().others_s(children_are_ours=True))
