"""Is a profile still true? What is measured again, and what follows."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from types import SimpleNamespace
from typing import Any

import pytest

from oallama.data.entries import DeviceInfo, OperatorTime
from oallama.data.profile import Profile
from oallama.loading import recheck, times_now
from oallama.loading.recheck import ProfileRefused, rechecked

PROFILE = Profile(
    created="2026-11-24",
    fingerprint={},
    devices=(DeviceInfo("CPU", "", "cpu", 0, "CPU"),),
    operators=(OperatorTime("CPU", "MUL_MAT", "q8_0", (64, 64, 1), 1, 1, 1e-3),),
)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Ratios that a measurement gives, of an old profile that is kept on a machine that is not quick."""
    ratios = {"CPU": 1.0}

    def check_drift(profile: Profile, devices: Sequence[str], *_: Any) -> dict[str, float]:
        return {device: ratios[device] for device in devices}

    monkeypatch.setattr(recheck, "check_drift", check_drift)
    monkeypatch.setattr(recheck, "is_quick", lambda: False)
    monkeypatch.setattr(recheck, "is_kept", lambda mark: True)
    monkeypatch.setattr(recheck, "_last", {})
    return ratios


def seconds(profile: Profile) -> float:
    return profile.operators[0].median_s


@pytest.mark.parametrize(("ratio", "scaled"), [(1.0, 1.0), (1.2, 1.0), (0.8, 1.0), (1.5, 1.5), (0.5, 0.5)])
def test_a_device_that_changed_has_its_times_scaled(ratio: float, scaled: float, measured: dict[str, float]) -> None:
    measured["CPU"] = ratio
    checked = rechecked(PROFILE, ["CPU"], 1)
    assert seconds(checked.profile) == pytest.approx(1e-3 * scaled)
    assert len(checked.notes) == (scaled != 1.0) and bool(checked.ratios) == (scaled != 1.0)


@pytest.mark.parametrize("ratio", [5.0, 0.1])
def test_times_of_another_machine_are_refused(ratio: float, measured: dict[str, float]) -> None:
    measured["CPU"] = ratio
    with pytest.raises(ProfileRefused, match=r"is wrong.*on CPU"):
        rechecked(PROFILE, ["CPU"], 1)


def test_one_wrong_check_refuses_nothing(measured: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> None:
    checks = iter([{"CPU": 9.0}, {"CPU": 1.0}])
    monkeypatch.setattr(recheck, "check_drift", lambda *_: next(checks))
    assert rechecked(PROFILE, ["CPU"], 1) == recheck.Checked(PROFILE)


def test_nothing_is_measured_beside_other_work(measured: dict[str, float]) -> None:
    measured["CPU"] = 9.0
    beside = rechecked(PROFILE, ["CPU"], 1, busy=True)
    assert beside.profile is PROFILE and "not checked" in beside.notes[0]


@pytest.mark.parametrize(("age_s", "checked"), [(1, False), (100, False), (200, True), (-200, True)])
def test_what_was_begun_just_now_is_not_measured_again(age_s: int, checked: bool, measured: dict[str, float]) -> None:
    """A profile of the future is checked: the clock was set back since."""
    measured["CPU"] = 2.0
    begun = datetime.now(timezone.utc) - timedelta(seconds=age_s)
    profile = replace(PROFILE, created=begun.isoformat(timespec="seconds"))
    assert bool(rechecked(profile, ["CPU"], 1).ratios) == checked


def test_plans_that_are_made_one_after_the_other_check_once(
    measured: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    measured["CPU"] = 2.0
    first = rechecked(PROFILE, ["CPU"], 1)
    measured["CPU"] = 3.0
    assert rechecked(PROFILE, ["CPU"], 1) == first and first.ratios == {"CPU": 2.0}
    later = time.monotonic() + 121
    monkeypatch.setattr(recheck, "time", SimpleNamespace(monotonic=lambda: later, time=time.time))
    assert rechecked(PROFILE, ["CPU"], 1).ratios == {"CPU": 3.0}


def test_a_profile_that_is_given_is_taken_as_it_is(measured: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> None:
    measured["CPU"] = 2.0
    monkeypatch.setattr(recheck, "is_kept", lambda mark: False)
    assert rechecked(PROFILE, ["CPU"], 1) == recheck.Checked(PROFILE)


def test_a_thorough_check_scales_smaller_differences(measured: dict[str, float]) -> None:
    measured["CPU"] = 1.2
    assert seconds(rechecked(PROFILE, ["CPU"], 1, thorough=True).profile) == pytest.approx(1.2e-3)


def test_a_profile_that_is_refused_is_recorded_anew(
    measured: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    measured["CPU"] = 9.0
    monkeypatch.setattr(times_now, "is_quick", lambda: True)
    monkeypatch.setattr(times_now, "history_of", lambda n_threads: None)
    monkeypatch.setattr(times_now, "learned_factors", lambda history, profile: {"CPU matrices": 2.0})
    times = times_now.times_now(PROFILE, [], 1, anew=lambda: PROFILE)
    assert "recorded anew" in times.notes[0] and seconds(times.profile) == pytest.approx(2e-3)
    with pytest.raises(ProfileRefused):
        times_now.times_now(PROFILE, [], 1)
