"""Is the profile still true? A second of measuring before a plan is made from times that were taken earlier."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime

from oallama.data.profile import Profile
from oallama.errors import OallamaError
from oallama.profiling.drift import check_drift, describe_drift
from oallama.profiling.fingerprint import is_quick
from oallama.profiling.recorder import is_kept

# A device that differs by more has its times scaled; by more than the second, its times are refused.
SCALED, REFUSED = 1.3, 4.0
_ENTRIES, _SECONDS = 2, 0.5
_NEW_S = 120.0


# When this process has checked a profile last, and what it found: plans that are made one after the other are from the
# same times.
_last: dict[tuple[object, ...], tuple[float, dict[str, float]]] = {}


class ProfileRefused(OallamaError):
    """The cached times are not this machine's; the message says of which device and by how much."""


@dataclass(frozen=True)
class Checked:
    """A profile to plan from. ratios: of devices whose times were scaled, now by then."""

    profile: Profile
    notes: tuple[str, ...] = ()
    ratios: dict[str, float] = field(default_factory=dict)


def rechecked(
    profile: Profile, devices: Sequence[str], n_threads: int, thorough: bool = False, busy: bool = False
) -> Checked:
    """Measure the two heaviest operators of each device again, and scale the times of those that differ.

    Nothing is measured for a profile that was begun in the last two minutes, for one that is not kept in the cache
    folder, and beside other work, which would say nothing of the profile. thorough: measure longer, in any case, and
    scale from a difference of 15 % on (`--recheck`).

    Raises ProfileRefused where a device differs by more than REFUSED: its times are of another machine, or damaged.
    """
    if profile.source != "measured":
        return Checked(profile)
    if thorough:
        ratios = check_drift(profile, devices, n_threads)
        lines = describe_drift(ratios, recorded=profile.created)
        return Checked(profile.scaled(ratios), _scaled(lines), ratios) if lines else Checked(profile)
    if is_quick() or not is_kept(profile.fingerprint) or _is_new(profile):
        return Checked(profile)
    if busy:
        return Checked(profile, ("the profile was not checked, because other programs are busy",))
    ratios = _ratios(profile, devices, n_threads)
    worst = max(ratios, key=lambda device: _factor(ratios[device]))
    if _factor(ratios[worst]) > REFUSED:
        raise ProfileRefused(
            f"the profile of {profile.created} is wrong: its longest operators take {ratios[worst]:.2g} times what it "
            f"says on {worst}"
        )
    off = {device: ratio for device, ratio in ratios.items() if _factor(ratio) > SCALED}
    lines = describe_drift(off, recorded=profile.created)
    return Checked(profile.scaled(off), _scaled(lines), off)


def _ratios(profile: Profile, devices: Sequence[str], n_threads: int) -> dict[str, float]:
    """Of a check, or of the one that this process made in the last two minutes.

    What would be refused is checked once more, for longer: a machine may stand still for a moment, and recording it
    anew takes minutes.
    """
    asked = profile.created, str(profile.fingerprint), *devices, n_threads
    at, ratios = _last.get(asked, (-_NEW_S, {}))
    if time.monotonic() - at >= _NEW_S:
        ratios = check_drift(profile, devices, n_threads, _ENTRIES, _SECONDS)
        if any(_factor(ratio) > REFUSED for ratio in ratios.values()):
            ratios = check_drift(profile, devices, n_threads)
        _last[asked] = time.monotonic(), ratios
    return ratios


def _factor(ratio: float) -> float:
    return max(ratio, 1 / ratio)


def _scaled(lines: Sequence[str]) -> tuple[str, ...]:
    return tuple(f"times scaled: {line}" for line in lines)


def _is_new(profile: Profile) -> bool:
    """Whether none of its times is old. One of the future is not new: the clock was set."""
    try:
        age_s = time.time() - datetime.fromisoformat(profile.created).timestamp()
    except ValueError:  # somebody wrote it
        return False
    return 0.0 <= age_s < _NEW_S
