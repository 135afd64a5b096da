"""Memory of this machine that programs may still take."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path


def available_bytes(root: Path = Path("/")) -> int | None:
    """What can be taken without swapping: of the machine, or of a control group with less; None: Linux does not say.

    Pages of files, which the kernel can drop, count as available, in a control group, too.
    """
    rooms = list(_of_groups(root))
    with suppress(OSError):
        if found := re.search(r"^MemAvailable:\s*(\d+) kB", (root / "proc/meminfo").read_text(), re.MULTILINE):
            rooms.append(int(found[1]) * 1024)
    return min(rooms, default=None)


def _of_groups(root: Path) -> Iterator[int]:
    """Of this process's control group (version 2) and all above it, those that have a limit."""
    mounted = root / "sys/fs/cgroup"
    with suppress(OSError):
        found = re.search(r"^0::/(.*)$", (root / "proc/self/cgroup").read_text(), re.MULTILINE)
        group = mounted / found[1] if found else mounted
        for folder in (group, *group.parents):
            if not folder.is_relative_to(mounted):
                return
            yield from _of_group(folder)


def _of_group(folder: Path) -> Iterator[int]:
    with suppress(OSError, ValueError):  # "max" is no number
        limit, used = (int((folder / name).read_text()) for name in ("memory.max", "memory.current"))
        of_files = re.findall(r"^(?:in)?active_file (\d+)$", (folder / "memory.stat").read_text(), re.MULTILINE)
        yield max(0, limit - used + sum(map(int, of_files)))
