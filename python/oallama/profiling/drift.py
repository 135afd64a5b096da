"""Has a machine changed since its profile was recorded? A second's re-measurement of the entries that weigh most."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, Protocol

from oallama.data.entries import OTHER, OperatorTime
from oallama.data.profile import REMEDY, Profile
from oallama.errors import OallamaError
from oallama.profiling.profiler import Probe
from oallama.profiling.workload import Task

# Runs of one operator on a quiet machine differ by a few percent; plans change at larger differences only.
TOLERANCE = 0.15
ADVICE = "record it again with `oallama profile MODEL.gguf --fresh`"


class Measures(Protocol):
    """What `check_drift` needs of a `Probe`."""

    def measure(self, task: Task) -> list[Any]: ...


class MakesProbe(Protocol):
    """`Probe`'s constructor: a device, its CPU threads, seconds per task."""

    def __call__(self, device: str, n_threads: int, max_s: float) -> Measures: ...


def check_drift(
    profile: Profile,
    devices: Sequence[str],
    n_threads: int,
    max_entries: int = 3,
    max_s: float = 1.0,
    make_probe: MakesProbe = Probe,
) -> dict[str, float]:
    """How many times longer each device takes now than when the profile was recorded (1.0: the same).

    The median over the longest `max_entries` matrix multiplications of a decode step, measured by the profiler's own
    probe.

    Args:
        devices: names of devices that are in the profile and on this machine.
        n_threads: CPU threads the profile was recorded with.
        max_s: seconds of measuring per device, warm-up excluded.
        make_probe: measures instead of `Probe`.

    Raises:
        OallamaError: for an unknown device, one without decode times in the profile, or a probe that fails.

    >>> check_drift(profile, ["CPU"], n_threads=8)
    {'CPU': 1.02}
    """
    ratios = {}
    for device in devices:
        entries = _heaviest(profile, device, max_entries)
        probe = make_probe(device, n_threads, max_s / len(entries))
        ratios[device] = median(probe.measure(_task(entry))[0].median_s / entry.median_s for entry in entries)
    return ratios


def describe_drift(ratios: Mapping[str, float], tolerance: float = TOLERANCE, recorded: str = "") -> list[str]:
    """A readable line per device that changed by more than `tolerance` (a share) either way; empty for none.

    recorded: the profile's `created`, to be shown.

    >>> describe_drift({"CPU": 1.31}, recorded="2026-01-31")
    ['CPU: 1.31x slower than when the profile was recorded (2026-01-31); record it again with ...']
    """
    when = f" ({recorded})" if recorded else ""
    lines = []
    for device, ratio in ratios.items():
        if change := describe_change(ratio, tolerance):
            lines.append(f"{device}: {change} than when the profile was recorded{when}; {ADVICE}")
    return lines


def describe_change(ratio: float, tolerance: float = TOLERANCE) -> str | None:
    """A ratio of times (now / then) as "1.31x slower" or "1.20x faster"; None within the tolerance."""
    factor, word = (ratio, "slower") if ratio >= 1 else (1 / ratio, "faster")
    return f"{factor:.2f}x {word}" if factor > 1 + tolerance else None


def _heaviest(profile: Profile, device: str, max_entries: int) -> list[OperatorTime]:
    profile.device(device)  # names the devices there are
    entries = [
        e for e in profile.operators if e.device == device and e.op != OTHER and e.n_tokens == 1 and e.median_s > 0
    ]
    if not entries:
        raise OallamaError(f"the profile has no decode times of {device} to compare with; {REMEDY} on that device")
    return sorted(entries, key=lambda e: e.median_s, reverse=True)[:max_entries]


def _task(entry: OperatorTime) -> Task:
    """The profiler's task that measured this entry."""
    k, m, n_expert = (*entry.ne, 1, 1)[:3]
    moe = entry.op == "MUL_MAT_ID"
    arguments = {
        "type": entry.type,
        "k": k,
        "m": m,
        "n_tokens": entry.n_tokens,
        "n_expert": n_expert if moe else 0,
        "n_used": entry.n_used if moe else 0,
        "realisation": entry.realisation,
    }
    return Task("mul_mat", tuple(sorted(arguments.items())), cost=float(k) * m * entry.n_used)
