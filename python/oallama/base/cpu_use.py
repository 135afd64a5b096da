"""What other processes take of this machine's CPUs, as Linux counts it (in ticks of 10 ms)."""

from __future__ import annotations

import os
import time
from pathlib import Path

_STAT = Path("/proc/stat")
# Columns of /proc/stat: user, nice, system, idle, iowait, irq, softirq, steal; guests are in user.
_BUSY = (0, 1, 2, 5, 6, 7)


def cpus_of_others(seconds: float = 0.2) -> float:
    """CPUs that are kept busy by others, the hypervisor's other guests included, while this process sleeps.

    0 where the system does not tell.
    """
    before = _busy_s()
    time.sleep(seconds)
    return max(0.0, _busy_s() - before) / seconds


def _busy_s() -> float:
    try:
        columns = _STAT.read_text().split("\n", 1)[0].split()[1:]
    except OSError:
        return 0.0
    return sum(int(columns[i]) for i in _BUSY if i < len(columns)) / os.sysconf("SC_CLK_TCK")
