"""Measures a device's thresholds, the two ways of each interleaved."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from statistics import median
from typing import Any

from oallama.base.environment import MMVQ_LIMITS
from oallama.data.tuning import KINDS, Crossover, Point, Tuning, find_tuning, mmvq_limits
from oallama.engine import device_list, native
from oallama.errors import OallamaError
from oallama.profiling.fingerprint import cpu_set, fingerprint
from oallama.profiling.profiler import cold_bytes
from oallama.profiling.recorder import cache_dir

SHAPE = (4096, 2048)
# Decode, a few sequences, around llama.cpp's own rules at 32, a full micro-batch.
TOKENS = (1, 2, 3, 4, 8, 16, 32, 64, 128, 512)
TYPES = ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q2_K", "q3_K", "q4_K", "q5_K", "q6_K", "iq4_nl", "mxfp4")
ROUNDS = 3
Progress = Callable[[float, float, str], None]

_MAX_SECONDS = 0.2  # per measurement


def tune(
    device: str,
    *,
    types: Sequence[str] = TYPES,
    shape: tuple[int, int] = SHAPE,
    n_threads: int = 0,
    cache: Path | None = None,
    progress: Progress | None = None,
) -> Tuning:
    """Measure the thresholds of `device` and keep them by its fingerprint.

    A CPU: from how many tokens repacked weights are faster than plain ones, for each type that it repacks. A CUDA
    device: up to how many columns MMVQ is faster than MMQ. Other devices have nothing to tune.

    Args:
        types: of weights. shape: (k, m) of the weight that is multiplied.
        n_threads: CPU threads; 0 takes all CPUs this process may use.
        cache: folder, by default that of the profiles.

    Raises:
        OallamaError: for an unknown device, one without anything to tune, or a type that cannot be measured.
    """
    n_threads = n_threads or len(cpu_set())
    found = device_list.device(device)
    kind = "repack" if found.type == "cpu" else "mmvq" if found.backend.startswith("CUDA") else None
    if kind is None:
        raise OallamaError(f"{device} ({found.backend}) has no thresholds to tune; expected a CPU or a CUDA device")
    core = native.core()
    sizes = TOKENS if kind == "repack" else tuple(range(1, core.MOST_MMVQ_COLUMNS + 1))
    crossovers = []
    try:
        bench = core.OpBench(device, n_threads, True, cold_bytes(found))
        wanted = [t for t in types if kind == "mmvq" or core.repacks(device, t, *shape, 0)]
        for i, type in enumerate(wanted):
            if progress:
                progress(i, len(wanted), f"{device}: {type}")
            points = tuple(_point(bench, kind, device, type, shape, n) for n in sizes)
            crossovers.append(Crossover(kind, type, shape, points))
    except (RuntimeError, ValueError, MemoryError) as err:
        raise OallamaError(f"tuning {device}: {err}") from err
    if progress:
        progress(len(wanted), len(wanted), "tuned")
    created = datetime.now(timezone.utc).isoformat(timespec="seconds")
    tuning = Tuning(created, device, _mark(device, n_threads), tuple(crossovers))
    tuning.save(cache or cache_dir())
    return tuning


def tuned(device: str, n_threads: int = 0, cache: Path | None = None) -> Tuning | None:
    """The table that `tune` kept for this device, this machine and so many threads; None without one."""
    return find_tuning(_mark(device, n_threads or len(cpu_set())), cache or cache_dir())


def apply_tuned(devices: Sequence[str], cache: Path | None = None) -> None:
    """Let these devices of this process obey their tables, where there are any."""
    if limits := mmvq_limits(_tables(devices, cache)):
        native.core().set_mmvq_limits(limits)


def tuned_variable(devices: Sequence[str], cache: Path | None = None) -> dict[str, str]:
    """The same for a llama.cpp program, as a variable of its environment; empty without tables."""
    limits = mmvq_limits(_tables(devices, cache))
    return {MMVQ_LIMITS.name: limits} if limits else {}


def _tables(devices: Sequence[str], cache: Path | None) -> list[Tuning]:
    return [table for device in devices if device.startswith("CUDA") and (table := tuned(device, cache=cache))]


def _mark(device: str, n_threads: int) -> dict[str, Any]:
    """What a table holds for; the host's threads do not change an accelerator's thresholds."""
    return fingerprint([device], n_threads if device_list.device(device).type == "cpu" else 0)


def _point(bench: Any, kind: str, device: str, type: str, shape: tuple[int, int], n_tokens: int) -> Point:
    seconds: dict[str, list[float]] = {way: [] for way in KINDS[kind]}
    core = native.core()
    weight = {"type": type, "k": shape[0], "m": shape[1], "n_tokens": n_tokens, "n_expert": 0, "n_used": 0}
    try:
        for _ in range(ROUNDS):
            for way, times in seconds.items():
                if kind == "mmvq":
                    core.set_mmvq_limit(device, type, core.MOST_MMVQ_COLUMNS if way == "mmvq" else 1)
                realisation = way if kind == "repack" else ""
                times.append(float(bench.mul_mat(**weight, max_s=_MAX_SECONDS, realisation=realisation)["median_s"]))
    finally:
        if kind == "mmvq":
            core.set_mmvq_limit(device, type, 0)
    first, second = (median(times) for times in seconds.values())
    return n_tokens, first, second
