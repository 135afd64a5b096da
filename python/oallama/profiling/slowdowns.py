"""What slows a processor down besides other programs, as far as Linux tells: heat or power limits, and short memory.

Sources: `cpu*/thermal_throttle` and `cpu*/cpufreq` of sysfs, which virtual machines and many boards do not have, and
`/proc/pressure/memory` (Linux 4.20, CONFIG_PSI).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

MEMORY_STALL = 0.05  # of the time; less is no reason to doubt a measurement
_CPUS, _PRESSURE = "sys/devices/system/cpu", "proc/pressure/memory"


@dataclass(frozen=True)
class Slowdowns:
    """Counts since the machine was started, at one moment.

    throttled: times that heat or power limits slowed a CPU. memory_stall_s: seconds in which a program waited for
    memory. at_s: seconds of the clock. 0 where the machine does not tell.
    """

    throttled: int
    memory_stall_s: float
    at_s: float

    @classmethod
    def now(cls, root: Path = Path("/")) -> Slowdowns:
        counts = _numbers(root, "thermal_throttle/core_throttle_count")
        return cls(int(sum(counts)), _memory_stall_s(root), time.monotonic())

    def memory_stall(self, before: Slowdowns) -> float:
        """Share of the time since then in which a program waited for memory."""
        passed = self.at_s - before.at_s
        return (self.memory_stall_s - before.memory_stall_s) / passed if passed > 0 else 0.0


def frequency(root: Path = Path("/")) -> float | None:
    """How fast the CPUs' clocks run now, as a share of their highest, mean; None where the machine does not tell."""
    now, most = [_numbers(root, f"cpufreq/{name}") for name in ("scaling_cur_freq", "cpuinfo_max_freq")]
    return sum(now) / sum(most) if now and sum(most) else None


def _numbers(root: Path, name: str) -> list[float]:
    """What all CPUs say under a name."""
    return [number for path in sorted((root / _CPUS).glob(f"cpu[0-9]*/{name}")) for number in _number(path)]


def _number(path: Path) -> Iterator[float]:
    with suppress(OSError, ValueError):
        yield float(path.read_text())


def _memory_stall_s(root: Path) -> float:
    with suppress(OSError, ValueError):
        for line in (root / _PRESSURE).read_text().splitlines():
            if line.startswith("some"):
                return float(line.rpartition("total=")[2]) / 1e6
    return 0.0
