"""Checks of what the system gives: processors, memory, limits, folders."""

from __future__ import annotations

import os
import resource
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from oallama.data.budget import format_bytes
from oallama.data.entries import QUIET_CPUS
from oallama.engine import native

from .finding import Finding

_HUGE_PAGES = "sys/kernel/mm/transparent_hugepage/enabled"
_GOVERNOR = "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"
_SHARED = 64 << 20


def cpus(root: Path, others: float) -> Finding:
    """others: CPUs that other programs keep busy."""
    allowed, there = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    found = f"{allowed} of {there} CPUs"
    if others > QUIET_CPUS:
        effect = "measurements take longer, and plans are less certain"
        return Finding("CPUs", "note", f"{found}, others use {others:.1f}", effect)
    if _read(root / _GOVERNOR) == "powersave":
        effect = "clocks may stay low while a model runs"
        return Finding("CPUs", "note", f"{found}, governor powersave", effect, "cpupower frequency-set -g performance")
    return Finding("CPUs", "ok", found)


def memory(root: Path) -> Finding:
    """What weights on the host may take, by the system and by control groups."""
    free, total = int(native.core().host_memory()), _total(root)
    found = f"{format_bytes(free)} for weights, of {format_bytes(total)}"
    if free < total // 4:
        return Finding("memory", "note", found, "other programs or a control group have most of it")
    return Finding("memory", "ok", found)


def locked_memory() -> Finding:
    """How much memory this process may lock, which --mlock needs."""
    _, most = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if most == resource.RLIM_INFINITY:
        return Finding("locked memory", "ok", "no limit")
    return Finding(
        "locked memory", "note", f"{format_bytes(most)} at most", "use_mlock locks no more than that",
        f'echo "{os.environ.get("USER", "root")} - memlock unlimited" >> /etc/security/limits.conf',
    )  # fmt: skip


def huge_pages(root: Path) -> Finding:
    """Whether Linux gives huge pages to caches and repacked weights."""
    text = _read(root / _HUGE_PAGES)
    chosen = text.partition("[")[2].partition("]")[0]
    if chosen in ("always", "madvise"):
        return Finding("huge pages", "ok", chosen)
    effect = "decode on the CPU is slower, by up to 1.4x where weights are repacked"
    remedy = f"echo madvise > /{_HUGE_PAGES}" if chosen else ""
    return Finding("huge pages", "note", chosen or "this kernel has none", effect, remedy)


def shared_memory(root: Path) -> Finding:
    """/dev/shm, where models that help each other exchange what they attend to."""
    folder = root / "dev/shm"
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        return Finding("shared memory", "missing", "/dev/shm cannot be written", "oallama serve --hot will not run")
    free = shutil.disk_usage(folder).free
    if free < _SHARED:
        effect = "oallama serve --hot and ranks of one host need more"
        return Finding(
            "shared memory", "note", f"{format_bytes(free)} free", effect, "mount -o remount,size=50% /dev/shm"
        )
    return Finding("shared memory", "ok", f"{format_bytes(free)} free")


def cache(folder: Path) -> Finding:
    """Where profiles, plans and traces are kept."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        effect = "every start measures and plans anew"
        found = f"{folder}: {error.strerror}"
        return Finding("cache folder", "missing", found, effect, "export XDG_CACHE_HOME=/a/folder/you/can/write")
    return Finding("cache folder", "ok", _at_home(folder))


def _at_home(folder: Path) -> str:
    home = Path.home()
    return f"~/{folder.relative_to(home)}" if folder.is_relative_to(home) else str(folder)


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _total(root: Path) -> int:
    lines: Sequence[str] = _read(root / "proc/meminfo").splitlines()
    sizes = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemTotal:")]
    return sizes[0] if sizes else 0
