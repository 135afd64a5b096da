"""Our kernels by several threads under sanitizers: random operators of every family."""

from __future__ import annotations

import json
import subprocess

import pytest

from oallama.engine import native
from support.paths import ROOT
from support.processes import ran
from support.sanitizers import skip_without

SCRIPT = ROOT / "scripts" / "sanitize_kernels.sh"
BUILD_S = 1800.0
KINDS = {
    "attend": ("dots", "dots alone", "columns"),
    "products": ("matrix", "mixture"),
    "decode": ("matrix", "mixture"),
}


def skip_without_kernels(family: str) -> None:
    if family == "decode" and not native.core().thin_has("q4_0"):
        pytest.skip("this CPU has no AVX2")


@pytest.mark.slow
@pytest.mark.parametrize(("sanitizer", "rounds"), [("thread", 30), ("address", 100)])
@pytest.mark.parametrize("family", KINDS)
def test_nothing_is_found(family: str, sanitizer: str, rounds: int) -> None:
    skip_without(sanitizer)
    skip_without_kernels(family)
    found = json.loads(ran(SCRIPT, family, sanitizer, str(rounds), timeout=BUILD_S).stdout.splitlines()[-1])
    assert found["rounds"] == rounds and all(found[kind] >= rounds // 8 for kind in KINDS[family])


@pytest.mark.slow
@pytest.mark.parametrize("family", KINDS)
def test_a_race_is_found(family: str) -> None:
    """Threads that do not wait for each other read parts of results before they are there."""
    skip_without("thread")
    skip_without_kernels(family)
    command = [SCRIPT, family, "thread", "30", "unwaited"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_S)
    assert done.returncode == 66 and "ThreadSanitizer: data race" in done.stderr
