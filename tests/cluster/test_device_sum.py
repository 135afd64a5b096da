"""Sums in device memory (csrc/comm/device_sum.h) with threads in place of GPUs; with ranks: test_device_ranks.py.

`device_sum_twin.cpp` is compiled here, also with ThreadSanitizer, and runs without parts of the protocol: each must
make a scenario fail, else the scenarios prove nothing.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from support.paths import NATIVE, ROOT

COMM = ROOT / "csrc" / "comm"
FLAGS = ("-std=c++17", "-g", "-ffp-contract=off", "-pthread", "-I", str(COMM), "-I", str(ROOT / "csrc" / "base"))
SANITIZER = "-fsanitize=thread"
RACE = "WARNING: ThreadSanitizer: data race"

Build = Callable[..., Path]

pytestmark = pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Build:
    """`build(*flags)`: the twin, compiled once with each set of flags."""
    folder = tmp_path_factory.mktemp("twin")

    @cache
    def get(*flags: str) -> Path:
        # Its functions for several processors are resolved before the sanitizer is there: without it.
        sums = folder / "sum.o"
        if not sums.exists():
            subprocess.run(["c++", *FLAGS, "-O2", "-c", COMM / "sum.cpp", "-o", sums], check=True)
        program = folder / f"twin{len(list(folder.iterdir()))}"
        source = NATIVE / "device_sum_twin.cpp"
        done = subprocess.run(["c++", *FLAGS, *flags, source, sums, "-o", program], capture_output=True, text=True)
        if done.returncode != 0 and "cannot find" in done.stderr:
            pytest.skip("no ThreadSanitizer")
        assert done.returncode == 0, done.stderr
        return program

    return get


def run(program: Path, scenario: str, without: str = "", limit: float = 120.0) -> tuple[int | None, str]:
    """Exit code (None: it did not end in time) and output."""
    environment = {**os.environ, "TSAN_OPTIONS": "halt_on_error=1"}
    try:
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        done = subprocess.run([program, scenario, without], timeout=limit, env=environment, **pipes)
    except subprocess.TimeoutExpired:
        return None, ""
    return done.returncode, done.stdout.decode(errors="replace")


@pytest.mark.parametrize(
    "scenario", [pytest.param("sums", marks=pytest.mark.slow), "many", "abort", "missing", "other"]
)
@pytest.mark.parametrize(
    "flags", [("-O2",), pytest.param(("-O1", SANITIZER), marks=pytest.mark.slow)], ids=["bits", "races"]
)
def test_protocol(build: Build, flags: tuple[str, ...], scenario: str) -> None:
    """1 to 8 ranks, all types, odd sizes, epochs beyond 2^32: the bits of oa_sum(), no race, every wait ends."""
    code, output = run(build(*flags), scenario, limit=300.0)
    assert (code, output) == (0, "ok\n"), output


@pytest.mark.slow
@pytest.mark.parametrize("part", ["release", "acquire", "sync", "buffers"])
def test_what_orders_memory_is_needed(build: Build, part: str) -> None:
    """x86 orders stores by itself; the sanitizer does not. The scenario may see the wrong data before it."""
    code, output = run(build("-O1", SANITIZER), "many", part)
    assert code != 0 and (RACE in output or "FAILED: " in output), output


@pytest.mark.parametrize(("part", "scenario", "says"), [
    ("abort", "abort", "an abort that was not seen"),
    ("buffers", "many", "another operation's flag"),
])  # fmt: skip
def test_what_else_is_needed(build: Build, part: str, scenario: str, says: str) -> None:
    """Without it something goes wrong, if not in every run of a busy machine; more than one rank may notice."""
    for _ in range(30):
        found = run(build("-O2"), scenario, part)
        if found != (0, "ok\n"):
            break
    code, output = found
    assert code == 1 and set((output or "").splitlines()) == {f"FAILED: {says}"}


def test_a_clock_is_needed(build: Build) -> None:
    """Without one a missing rank is waited for without end."""
    assert run(build("-O2"), "missing", "clock", 3.0) == (None, "")
