"""Sender, receiver and the threads of graphs on one region under ThreadSanitizer; scripts/tsan_weave.sh runs more."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import ROOT

sys.path.insert(0, str(ROOT / "tests" / "tsan"))
from run import run

FOLDER = ROOT / "build" / "tsan"


@pytest.fixture(scope="session")
def program() -> Path:
    if not (FOLDER / "build.ninja").exists() or shutil.which("clang++") is None:
        pytest.skip("build/tsan is not there: scripts/tsan_weave.sh makes it with clang, which takes a minute")
    subprocess.run(["cmake", "--build", FOLDER, "--target", "weave_tsan"], check=True, capture_output=True)
    return FOLDER / "weave_tsan"


@pytest.mark.slow
def test_no_race(program: Path) -> None:
    found = run(program, 20)
    assert found["races"] == 0
    assert found["epochs"] == 20 and found["tasks"] > 1000 and found["refused"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("word", ["tail", "done", "taken", "claim", "left"])
def test_races_are_found(program: Path, word: str) -> None:
    assert run(program, 20, word, "release")["races"] > 0
