"""A control group that limits memory, page cache included: as in a container, or on a smaller host."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
# Version 1 has a hierarchy of its own for memory, and no swap where both limits are alike.
V1 = (ROOT / "memory", ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes"))
V2 = (ROOT, ("memory.max",))


@contextmanager
def limited_memory(nbytes: int) -> Iterator[Path | None]:
    """The file that takes the ids of processes of a new group of so many bytes; None where no group can be made."""
    root, limits = V1 if V1[0].is_dir() else V2
    group = root / f"oallama-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError:
        yield None
        return
    try:
        for limit in limits:
            if (group / limit).exists():
                (group / limit).write_text(str(nbytes))
        yield group / "cgroup.procs" if (group / limits[0]).exists() else None
    except OSError:
        yield None
    finally:
        group.rmdir()
