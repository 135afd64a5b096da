"""Our attention by several threads under sanitizers: random operators, few rows and many, whole caches and parts."""

from __future__ import annotations

import json
import subprocess

import pytest

from support.paths import ROOT
from support.processes import ran
from support.sanitizers import skip_without

SCRIPT = ROOT / "scripts" / "sanitize_attend.sh"
BUILD_S = 1800.0


@pytest.mark.slow
@pytest.mark.parametrize(("sanitizer", "rounds"), [("thread", 30), ("address", 100)])
def test_nothing_is_found(sanitizer: str, rounds: int) -> None:
    skip_without(sanitizer)
    found = json.loads(ran(SCRIPT, sanitizer, str(rounds), timeout=BUILD_S).stdout.splitlines()[-1])
    assert found["rounds"] == rounds and found["dots"] >= rounds // 4 and found["columns"] >= rounds // 4


@pytest.mark.slow
def test_a_race_is_found() -> None:
    """Threads that do not wait for each other read parts of results before they are there."""
    skip_without("thread")
    done = subprocess.run([SCRIPT, "thread", "30", "unwaited"], capture_output=True, text=True, timeout=BUILD_S)
    assert done.returncode == 66 and "ThreadSanitizer: data race" in done.stderr
