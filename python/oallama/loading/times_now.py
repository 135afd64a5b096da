"""The times to plan with now: the profile, checked and corrected by what runs have taught, and how noisy it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from oallama.data.entries import QUIET_CPUS
from oallama.data.plan import HOST
from oallama.data.profile import Profile
from oallama.engine import device_list
from oallama.loading.learning import history_of, learned_factors
from oallama.loading.recheck import Checked, ProfileRefused, rechecked
from oallama.planning.uncertainty import noise_of
from oallama.profiling.fingerprint import computes_on_host, cpu_set, is_quick
from oallama.profiling.other_work import cpus_of_others

# A device on the host's own processor takes turns with it for cores and caches, which no profile measures: plans that
# use it are all slower than predicted.
_HOSTED_NOISE = 0.1


@dataclass(frozen=True)
class TimesNow:
    """A profile to plan with.

    learned: factors that its times hold. noise, least_noise: as `Space` takes them. notes: for plans.
    """

    profile: Profile
    noise: float
    learned: Mapping[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    least_noise: float = 0.0


def times_now(
    profile: Profile,
    accelerators: Sequence[str],
    n_threads: int,
    thorough: bool = False,
    anew: Callable[[], Profile] | None = None,
) -> TimesNow:
    """Check the profile of this machine, correct it, and see what else the machine does.

    thorough: as in `rechecked`. anew: records it again where it is refused; None raises ProfileRefused.
    """
    devices = (*accelerators, HOST)
    now = 0.0 if is_quick() else cpus_of_others()
    try:
        checked = rechecked(profile, devices, n_threads, thorough=thorough, busy=now > QUIET_CPUS)
    except ProfileRefused as refused:
        if anew is None:
            raise
        checked = Checked(anew(), (f"{refused}; it was recorded anew",))
    learned = {} if checked.ratios else learned_factors(history_of(n_threads), checked.profile.created)
    hosted = any(computes_on_host(device_list.device(name).description) for name in accelerators)
    noise = max(noise_of(checked.profile, devices), now / len(cpu_set()))
    notes = (*checked.notes, *_busy_note(now))
    return TimesNow(checked.profile.corrected(learned), noise, learned, notes, _HOSTED_NOISE if hosted else 0.0)


def _busy_note(cpus: float) -> list[str]:
    """A line for a plan that is made while other programs keep so many CPUs busy; none on a quiet machine."""
    if cpus < QUIET_CPUS:
        return []
    return [f"other programs keep {cpus:.1f} CPUs busy now; with them a request may take as long as the range says"]
