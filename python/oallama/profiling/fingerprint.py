"""What a profile holds for: the machine, its devices and drivers, the thread count and the engine that was timed."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from oallama.base.environment import INSTRUCTIONS, MODULES, QUICK_PROFILE
from oallama.base.jsonfile import read_json_object, write_text_atomic
from oallama.base.processor import processor
from oallama.engine import device_list, native, runtime
from oallama.engine.device_list import Device
from oallama.errors import OallamaError
from oallama.profiling.recorder import cache_dir

_DRIVER_VERSION = Path("/sys/module/nvidia/version")
_ENGINES = 20  # whose hashes are kept
_LOOPBACK = re.compile(r"(127\.0\.0\.1|localhost|\[::1\]):\d+")


def fingerprint(devices: Sequence[str], n_threads: int) -> dict[str, Any]:
    """Everything that makes measured times invalid when it changes, as JSON-able values."""
    special: dict[str, Any] = {"quick": True} if is_quick() else {}
    if instructions := INSTRUCTIONS.get():
        special["instructions"] = instructions
    return special | {
        "cpu": f"{processor()} x{len(cpu_set())}",
        "machine": platform.machine(),
        "n_threads": n_threads,
        "devices": {name: device_identity(device_list.device(name)) for name in devices},
        "driver": nvidia_driver(),
        "engine": engine_version(),
    }


def is_quick() -> bool:
    """Whether this process measures in a fraction of the time: its profiles hold for processes of this kind alone."""
    return bool(os.environ.get(QUICK_PROFILE.name))


def computes_on_host(description: str) -> bool:
    """Whether a device is this host's processor and memory in disguise: a loopback RPC server, Vulkan in software."""
    return bool(_LOOPBACK.search(description)) or "llvmpipe" in description.lower()


def device_identity(device: Device) -> str:
    """A device without what changes from run to run: the port of a loopback RPC server, free memory."""
    return f"{device.backend.partition('[')[0]}: {_LOOPBACK.sub('loopback', device.description)}"


def cpu_set() -> set[int]:
    """CPUs this process may run on."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def check_threads(n_threads: int) -> None:
    """Raises OallamaError for more CPU threads than this process may use: spinning ones would wait for turns."""
    if n_threads > len(cpu_set()):
        raise OallamaError(
            f"{n_threads} threads on the {len(cpu_set())} CPUs that this process may use would wait for each other; "
            f"take at most {len(cpu_set())} (0: all of them)"
        )


@cache
def nvidia_driver() -> str:
    """Version of the NVIDIA driver, empty without one."""
    with suppress(OSError):  # the program takes up to a second, and WSL has no such file
        return _DRIVER_VERSION.read_text().strip()
    if shutil.which("nvidia-smi") is None:
        return ""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        result = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return result.stdout.split("\n", 1)[0].strip()


@cache
def engine_version() -> str:
    """Hash over the libraries that compute and the module that measures: another build may say something else.

    Kept in the cache folder as long as their sizes and times are the same: with CUDA they are hundreds of megabytes.
    """
    folders = (runtime.lib_dir(), *(Path(folder) for folder in (MODULES.get() or "").split(":") if folder))
    libraries = [path for folder in folders for path in sorted(folder.glob("libggml*.so"))]
    paths = (*libraries, Path(native.core().__file__ or ""))
    found = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
    mark = hashlib.sha256(json.dumps(found).encode()).hexdigest()[:16]
    file = cache_dir() / "engines.json"
    known: dict[str, str] = {}
    with suppress(OallamaError):
        known = read_json_object(file, "hashes of engines", "delete it")
    if mark not in known:
        known = {**dict([*known.items()][-_ENGINES:]), mark: _hash(paths)}
        with suppress(OallamaError):  # a cache that cannot be written
            write_text_atomic(file, json.dumps(known, indent=1) + "\n", "hashes of engines")
    return known[mark]


def _hash(paths: Sequence[Path]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        digest.update(path.name.encode())
        with path.open("rb") as file:
            while chunk := file.read(1 << 20):
                digest.update(chunk)
    return digest.hexdigest()[:16]
