"""How far a prediction may be off, and which of several plans loses least when it is.

Computing on a device is mostly predicted within a few percent on a quiet machine. What passes between devices is
predicted worst, and other work multiplies it: every copy and every device change is a wait for a thread to be given a
CPU.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from ..data.entries import CLEAN, AttentionTime, ChainTime, LinkTime, OperatorTime, ShapeTime
from ..data.plan import HOST, PlacementPlan
from ..data.predicted import CAUSES_BETWEEN, TIE, traffic, unusual_form
from ..data.profile import Profile

# Shares by which a choice takes a cause of seconds to be off without noise, and what one unit of noise adds. Chosen,
# not fitted: the first is near the median error of chosen plans on the host in the cells of RECORDED_IN, the others are
# larger where a remote device was six times slower than predicted beside other work.
_COMPUTING = (0.04, 1.0)
_BETWEEN = (0.25, 10.0)
# Shares by which nine of ten predicted requests, and ratios of two, were off at most in the cells of RECORDED_IN: of
# the host alone, and with a device. That was a loopback server, and Vulkan in software once; no GPU was measured.
RECORDED_IN = "bench/results/2026-11-[23][790]-cells*.jsonl"  # of the 27th, 29th and 30th
OFF_ON_HOST, OFF_WITH_DEVICE = 0.12, 0.27
# A plan that is so many times slower than another is not worth making.
HOPELESS = 1.25
# Shares by which matrices take longer than predicted in micro-batches of so many times the largest that was measured:
# the worst of the cells in EXTRAPOLATED_FROM. Larger ones count as the last.
EXTRAPOLATED_FROM = "bench/results/2026-11-24-beyond-tiers.jsonl"
_EXTRAPOLATED = {2: 0.144, 4: 0.818}


def noise_of(profile: Profile, devices: Collection[str]) -> float:
    """How much too long times may be that were taken beside other work, as a share of all times; 0: all alone."""
    entries: list[OperatorTime | AttentionTime | ChainTime | ShapeTime | LinkTime]
    entries = [*profile.operators, *profile.attention, *profile.chains, *profile.shapes, *profile.links]
    timed = [e for e in entries if e.device in devices and e.median_s > 0]
    excess = [max(0.0, e.median_s / e.best_s - 1) for e in timed if e.clean < CLEAN and e.best_s > 0]
    return sum(excess) / len(timed) if timed else 0.0


def request_range(plan: PlacementPlan, noise: float = 0.0) -> tuple[float, float]:
    """Seconds between which the plan's request is expected in nine of ten cases, as (least, most).

    noise: 0 on a quiet machine with a profile taken alone; 0.5 where half of the CPUs' time goes to others, or where
    times are half too long. Other work makes a request longer, so the lower end does not depend on it.
    """
    seconds = plan.predicted.request_s
    off = _off(plan) * seconds
    return seconds - off, seconds + off + _longer(plan, noise) - _longer(plan, 0.0)


def ratio_range(plan: PlacementPlan, other: PlacementPlan, noise: float = 0.0) -> tuple[float, float]:
    """Between which numbers of times as fast as `other` the plan is expected to be in nine of ten cases.

    noise: as of `request_range`.
    """
    seconds, others = plan.predicted.request_s, other.predicted.request_s
    if seconds <= 0:
        return 1.0, 1.0
    off = max(max(_off(plan), _off(other)) * others, doubt(plan, other, noise)) / seconds
    return max(0.0, others / seconds - off), others / seconds + off


def doubt(plan: PlacementPlan, other: PlacementPlan, noise: float = 0.0) -> float:
    """Seconds by which the difference of two plans' requests may be off: what both do alike counts for neither.

    Other work makes two plans on the host alone slower by the same factor, so noise does not count between them.
    """
    if {*plan.devices, *other.devices} == {HOST}:
        noise = 0.0
    here, there = _by_cause(plan), _by_cause(other)
    return sum(abs(here.get(c, 0.0) - there.get(c, 0.0)) * _share(c, noise) for c in {*here, *there})


def ranked(plans: Mapping[str, PlacementPlan], noise: float = 0.0) -> list[str]:
    """Names of plans, the one to take first, then by predicted request time.

    The first is found from the safest plan on, which has the least traffic between devices and then the fewest devices
    and llama.cpp's own form of attention. A plan with more traffic takes its place when it is predicted to be faster by
    more than `doubt`, and by more than TIE.
    """
    by_safety = sorted(plans, key=lambda name: risk(plans[name]))
    by_seconds = sorted(plans, key=lambda name: plans[name].predicted.request_s)
    first = by_safety[0]
    for name in by_safety[1:]:
        gain = plans[first].predicted.request_s - plans[name].predicted.request_s
        least = TIE * plans[name].predicted.request_s
        if gain > max(least, doubt(plans[name], plans[first], noise)):
            first = name
    return [first, *(name for name in by_seconds if name != first)]


def cannot_win(least: float, plans: Mapping[str, PlacementPlan], noise: float = 0.0) -> bool:
    """Whether a plan whose request takes `least` seconds or more would not be the first of `ranked` beside these.

    It is far behind the fastest of them, also where that takes as long as is expected at most, and its own computing is
    faster than predicted by as much as that may be.
    """
    fastest = min(plans.values(), key=lambda plan: plan.predicted.request_s)
    seconds = fastest.predicted.request_s
    most = seconds + _longer(fastest, noise)
    return least > HOPELESS * seconds and least * (1 - _share("targets", noise)) > most


def extrapolation_doubt(n_tokens: int, measured: int) -> float:
    """The share by which matrices may take longer than predicted at n_tokens, where `measured` tokens are the most that
    were timed.
    """
    if n_tokens <= measured:
        return 0.0
    shares = (share for times, share in _EXTRAPOLATED.items() if n_tokens <= times * measured)
    return next(shares, max(_EXTRAPOLATED.values()))


def risk(plan: PlacementPlan) -> tuple[float, ...]:
    """A key to sort plans by, the safest first: the one that other work delays least."""
    return traffic(plan), len(plan.devices), *unusual_form(plan), plan.predicted.request_s


def _off(plan: PlacementPlan) -> float:
    return OFF_ON_HOST if {*plan.devices} == {HOST} else OFF_WITH_DEVICE


def _longer(plan: PlacementPlan, noise: float) -> float:
    """Seconds by which a request may take longer, as a choice counts it."""
    return sum(seconds * _share(cause, noise) for cause, seconds in _by_cause(plan).items())


def _share(cause: str, noise: float) -> float:
    quiet, more = _BETWEEN if cause in CAUSES_BETWEEN else _COMPUTING
    return quiet + more * noise


def _by_cause(plan: PlacementPlan) -> dict[str, float]:
    stages: Sequence[Mapping[str, float]] = [*plan.predicted.parts.values()]
    return {cause: sum(stage.get(cause, 0.0) for stage in stages) for stage in stages for cause in stage}
